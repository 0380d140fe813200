// Runs a block of a program: warps in turn, each until it waits, the lanes of a warp that are at the same place
// together.
#include <algorithm>
#include <climits>
#include <numeric>

#include "ptx/library.h"
#include "ptx/ptx.h"
#include "ptx/warp.h"

namespace gpu_model::ptx {

Warp::Warp(Block& block, const Program& program, const std::vector<unsigned char>& parameters, int number)
    : block(block),
      program(program),
      number(number),
      registers(program.registers),
      written(program.registers),
      frames(size_t(32) * program.frame_bytes, 0xff),
      parameters(parameters),
      live(block.warps[number].present) {
  const auto fill = [&](int to, auto&& f) {
    written[to] = ~0u;
    for (int i = 0; i < 32; ++i) registers[to][i] = f(i);
  };
  for (const auto& [value, to] : program.constants) fill(to, [v = value](int) { return v; });
  for (const auto& [name, to] : program.of_thread)
    fill(to, [&, this](int i) -> uint64_t {
      if (!name.ends_with(".x")) return name.starts_with("%nctaid");  // grids and blocks have one dimension
      return name == "%tid.x" ? this->number * 32 + i : name == "%ctaid.x" ? this->block.number : this->block.blocks;
    });
  std::fill(pc, pc + 32, program.entry);
}

namespace {

uint32_t lanes_at(const Warp& w, uint32_t among, int pc) {
  uint32_t lanes = 0;
  each_lane(among, [&](int i) { lanes |= uint32_t(w.pc[i] == pc) << i; });
  return lanes;
}
void move_to(Warp& w, uint32_t lanes, int pc) {
  each_lane(lanes, [&](int i) { w.pc[i] = pc; });
}

uint32_t guarded(const Warp& w, const Instruction& in, uint32_t lanes) {
  if (in.guard < 0) return lanes;
  uint32_t chosen = 0;
  each_lane(lanes, [&](int i) { chosen |= uint32_t((w.registers[in.guard][i] != 0) != in.negated) << i; });
  return chosen;
}

void check_written(Warp& w, const Instruction& in, int from, uint32_t lanes) {
  if (!(lanes & ~w.written[from])) return;
  report("register-never-written", in.line, w.program.register_names[from] + " in " + in.text);
  w.written[from] |= lanes;
}
void execute(Warp& w, const Instruction& in, uint32_t lanes) {
  if (!lanes) return;
  for (const int from : in.from) check_written(w, in, from, lanes);
  in.run(w, in, lanes);
  for (const int to : in.to) w.written[to] |= lanes;
}

void transfer(Warp& w, const std::vector<Transfer>& list, int lane) {
  for (const Transfer& x : list) std::memcpy(w.frame(lane) + x.to, w.frame(lane) + x.from, x.bytes);
}
void call(Warp& w, const Instruction& in, int lane) {
  transfer(w, in.arguments, lane);
  w.calls[lane].push_back(w.pc[lane]);
  w.pc[lane] = in.target;
}
void leave(Warp& w, int lane) {
  if (w.calls[lane].empty()) {
    w.live &= ~(1u << lane);
    return end_lane(w.lane(lane));
  }
  const int from = w.calls[lane].back();
  w.calls[lane].pop_back();
  transfer(w, w.program.code[from].results, lane);
  w.pc[lane] = from + 1;
}

// An instruction that may send lanes different ways; they are at `pc`.
void go(Warp& w, const Instruction& in, uint32_t lanes, int pc) {
  const uint32_t taken = guarded(w, in, lanes);
  move_to(w, lanes & ~taken, pc + 1);
  each_lane(taken, [&](int i) {
    w.pc[i] = pc;
    if (in.flow == Flow::branch) w.pc[i] = in.target;
    if (in.flow == Flow::call) call(w, in, i);
    if (in.flow == Flow::leave) leave(w, i);
    if (in.flow == Flow::barrier) w.at_barrier |= 1u << i;
  });
}

// Runs lanes that are together from `pc` on, until they part, wait, or come to where others are.
void run_straight(Warp& w, uint32_t here, int pc, int others) {
  while (pc < others) {
    const Instruction& in = w.program.code[pc];
    if (in.guard >= 0) check_written(w, in, in.guard, here);
    if (in.flow == Flow::together) {
      const uint32_t arrived = here | lanes_at(w, w.together, pc);
      move_to(w, here, pc);
      w.together |= arrived;
      if (arrived != w.block.warps[w.number].present) return;
      w.together = 0, here = arrived;
      execute(w, in, here);
    } else if (in.flow == Flow::next) {
      execute(w, in, guarded(w, in, here));
    } else {
      return go(w, in, here, pc);
    }
    ++pc;
  }
  move_to(w, here, pc);
}

// The lanes that are furthest behind go first, so that those that parted meet again.
void run_until_waiting(Warp& w) {
  while (const uint32_t ready = w.live & ~w.together & ~w.at_barrier) {
    int first = INT_MAX, next = INT_MAX;
    each_lane(ready, [&](int i) { first = std::min(first, w.pc[i]); });
    const uint32_t here = lanes_at(w, ready, first);
    each_lane(ready & ~here, [&](int i) { next = std::min(next, w.pc[i]); });
    run_straight(w, here, first, next);
  }
}

const Instruction& where(const Warp& w, uint32_t lanes) {
  return w.program.code[w.pc[std::countr_zero(lanes)]];
}

// Every lane waits or has ended. False where they can never go on.
bool can_go_on(const std::vector<Warp>& warps) {
  const Warp* waits = nullptr;
  bool all = true;
  for (const Warp& w : warps) {
    const bool whole = w.live == w.block.warps[w.number].present;
    if (w.together) {
      const Instruction& in = where(w, w.together);
      report(whole ? "divergent-warp" : "missing-lane", in.line, "warp " + std::to_string(w.number) + ": " + in.text);
      return false;
    }
    all = all && whole;
    if (w.live) waits = &w;
  }
  if (!waits) return false;
  const Instruction& barrier = where(*waits, waits->live);
  if (!all) report("barrier-after-exit", barrier.line, "some threads have ended");
  for (const Warp& w : warps)
    each_lane(w.live, [&](int i) {
      if (w.program.code[w.pc[i]].line.line == barrier.line.line) return;
      report("divergent-barrier", barrier.line, "others wait at " + place(w.program.code[w.pc[i]].line));
      all = false;
    });
  return all;
}

void release(std::vector<Warp>& warps) {
  Block& b = warps.front().block;
  ++b.epoch, ++counters().barriers;
  for (Warp& w : warps) {
    ++b.warps[w.number].epoch;
    each_lane(w.live, [&](int i) { ++w.pc[i]; });
    w.at_barrier = 0;
  }
}

std::vector<int> order_of(int warps) {
  std::vector<int> order(warps);
  std::iota(order.begin(), order.end(), 0);
  if (options().lanes == Order::reverse) std::reverse(order.begin(), order.end());
  if (options().lanes == Order::shuffled)
    for (int n = warps; n > 1; --n) std::swap(order[n - 1], order[next_random() % n]);
  return order;
}

}  // namespace

void run_block(Block& b) {
  const Program& program = program_of(*b.kernel);
  const std::vector<unsigned char> parameters = parameter_block(program, *b.kernel);
  if (program.most_threads && b.threads > program.most_threads)
    report("too-many-threads", program.code[program.entry].line, std::to_string(b.threads));
  std::vector<Warp> warps;
  warps.reserve(b.warps.size());
  for (int n = 0; n < int(b.warps.size()); ++n) warps.emplace_back(b, program, parameters, n);
  do {
    for (const int n : order_of(int(warps.size()))) run_until_waiting(warps[n]);
  } while (can_go_on(warps) && (release(warps), true));
}

}  // namespace gpu_model::ptx
