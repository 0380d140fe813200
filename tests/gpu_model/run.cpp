// Schedules the fibers of a block: barriers, meetings of a warp, deadlocks.
#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

#include "ptx/ptx.h"
#include "state.h"

#if defined(__x86_64__)
asm(R"(
.text
.globl gpu_model_switch
.hidden gpu_model_switch
.type gpu_model_switch,@function
gpu_model_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size gpu_model_switch,.-gpu_model_switch
)");
#endif

namespace gpu_model {

thread_local Block* current = nullptr;

namespace {

constexpr size_t kStack = 64 * 1024;

struct Findings {
  std::vector<std::string> texts;
  std::map<std::pair<std::string, std::string>, int> seen;
};
// The block that runs, for as long as this lives.
struct Current {
  explicit Current(Block* b) { current = b; }
  ~Current() { current = nullptr; }
};

Findings& findings() {
  static Findings all;
  return all;
}

Lane* pick_shuffled() {
  Block& b = *current;
  const int warps = int(b.warps.size()), start = int(next_random() % warps);
  for (int i = 0; i < warps; ++i) {
    const int w = (start + i) % warps;
    uint32_t ready = b.warps[w].ready;
    if (!ready) continue;
    for (int skip = int(next_random() % std::popcount(ready)); skip > 0; --skip) ready &= ready - 1;
    return &b.lane(w, std::countr_zero(ready));
  }
  return nullptr;
}

// The next thread that can go on, around from the one that ran last.
Lane* pick() {
  if (options().lanes == Order::shuffled) return pick_shuffled();
  Block& b = *current;
  const bool forward = options().lanes == Order::forward;
  const int warps = int(b.warps.size());
  const int w0 = b.now ? b.now->warp() : forward ? 0 : warps - 1, l0 = b.now ? b.now->lane() : forward ? -1 : 32;
  for (int i = 0; i <= warps; ++i) {
    const int w = forward ? (w0 + i) % warps : (w0 - i + 2 * warps) % warps;
    uint32_t ready = b.warps[w].ready;
    if (i == 0) ready &= forward ? (l0 < 31 ? ~0u << (l0 + 1) : 0) : (l0 > 31 ? ~0u : (1u << std::max(l0, 0)) - 1);
    if (ready) return &b.lane(w, forward ? std::countr_zero(ready) : 31 - std::countl_zero(ready));
  }
  return nullptr;
}

void go(Lane* next) {
  Lane* me = current->now;
  if (next == me) return;
  current->now = next;
  Fiber::swap(me->fiber, next ? next->fiber : current->main);
}
void leave() {
  go(current->aborted ? nullptr : pick());
}

void make_ready(Lane& lane) {
  lane.state = State::ready;
  current->warps[lane.warp()].ready |= 1u << lane.lane();
}
void wait_in(State state, Line line) {
  Lane& me = *current->now;
  me.state = state, me.at = line;
  current->warp().ready &= ~(1u << me.lane());
  leave();
}

// What every fiber runs.
void entry() {
  current->kernel->call();
  Block& b = *current;
  Lane& me = *b.now;
  end_lane(me);
  me.state = State::done;
  ++b.done;
  b.warp().ready &= ~(1u << me.lane()), b.warp().live &= ~(1u << me.lane());
  leave();
  std::abort();
}

void clear_block(Block& b, int64_t number) {
  b.number = number, b.epoch = 1, b.waiting = b.done = 0, b.now = nullptr, b.aborted = false;
  std::fill(b.memory.begin(), b.memory.end(), 0xff);
  std::fill(b.cells.begin(), b.cells.end(), Cell{});
  b.warps.assign(b.warps.size(), Warp{});
  for (auto& lane : b.lanes) {
    lane->open.clear(), lane->committed.clear();
    Warp& w = b.warps[lane->warp()];
    w.present |= 1u << lane->lane(), w.live = w.present;
  }
}

void start_fibers(Block& b) {
  for (auto& lane : b.lanes) {
    lane->fiber.start(lane->stack.get() + lane->number % 64 * 64, kStack, entry);  // staggered, for the caches' sake
    make_ready(*lane);
  }
}

void run_fibers(Block& b) {
  while (!b.aborted && b.done < b.threads) {
    Lane* next = pick();
    if (!next) {
      const auto stuck = std::find_if(b.lanes.begin(), b.lanes.end(), [](auto& l) { return l->state != State::done; });
      report("deadlock", (*stuck)->at,
             std::to_string(b.threads - b.done) + " threads wait for ever, " + (*stuck)->name());
      return;
    }
    b.now = next;
    Fiber::swap(b.main, next->fiber);
    b.now = nullptr;
  }
}

// Stacks are kept from launch to launch.
std::vector<std::unique_ptr<char[]>>& spare_stacks() {
  static thread_local std::vector<std::unique_ptr<char[]>> stacks;
  return stacks;
}

}  // namespace

Options& options() {
  static Options all;
  return all;
}
Counters& counters() {
  static Counters all;
  return all;
}

std::string place(Line line) {
  const char* name = std::strrchr(line.file, '/');
  return std::string(name ? name + 1 : line.file) + ":" + std::to_string(line.line);
}

void report(const char* kind, Line line, const std::string& text) {
  if (findings().seen[{kind, place(line)}]++) return;
  const std::string where = current ? ", block " + std::to_string(current->number) + ": " : ": ";
  findings().texts.push_back(std::string(kind) + " at " + place(line) + where + text);
}
std::vector<std::string> take_findings() {
  return std::exchange(findings(), {}).texts;
}

void abort_block() {
  current->aborted = true;
  go(nullptr);
  std::abort();
}

uint64_t next_random() {
  uint64_t& s = current->random;
  s ^= s << 13, s ^= s >> 7, s ^= s << 17;
  return s;
}

void end_lane(Lane& lane) {
  for (const auto* copies : {&lane.open, &lane.committed})
    for (const Copy& copy : *copies)
      report("copy-never-waited", copy.line, lane.name() + " ends with a copy in flight");
}

void launch(int64_t blocks, int threads, int shared_bytes, const Kernel& kernel) {
  static uint64_t launches = 0;
  if (shared_bytes > options().shared_bytes)
    return report("too-much-shared-memory", Line::current(), std::to_string(shared_bytes) + " bytes of a block");
  Block b{};
  b.launch = ++launches;
  b.blocks = blocks, b.threads = threads, b.kernel = &kernel, b.random = options().seed * 0x9e3779b97f4a7c15ull + 1;
  b.memory.resize(shared_bytes), b.cells.resize(shared_bytes / 4 + 1), b.warps.resize((threads + 31) / 32);
  for (int n = 0; n < threads; ++n) {
    auto lane = std::make_unique<Lane>();
    lane->number = n;
    if (!spare_stacks().empty()) lane->stack = std::move(spare_stacks().back()), spare_stacks().pop_back();
    if (!lane->stack) lane->stack.reset(new char[kStack + 64 * 64]);
    b.lanes.push_back(std::move(lane));
  }
  std::vector<int64_t> order(blocks);
  for (int64_t n = 0; n < blocks; ++n) order[n] = options().blocks == Order::reverse ? blocks - 1 - n : n;
  const Current here(&b);
  if (options().blocks == Order::shuffled)
    for (int64_t n = blocks; n > 1; --n) std::swap(order[n - 1], order[next_random() % n]);
  for (const int64_t number : order) {
    clear_block(b, number);
    options().ptx ? ptx::run_block(b) : (start_fibers(b), run_fibers(b));
  }
  for (auto& lane : b.lanes) spare_stacks().push_back(std::move(lane->stack));
}

int thread() {
  return current->now->number;
}
int64_t block() {
  return current->number;
}
int64_t blocks() {
  return current->blocks;
}

void sync_threads(Line line) {
  Block& b = *current;
  Lane& me = *b.now;
  if (b.done) {
    report("barrier-after-exit", line, me.name() + " waits but " + std::to_string(b.done) + " threads have ended");
    abort_block();
  }
  for (const auto& lane : b.lanes)
    if (lane->state == State::at_barrier && lane->at.line != line.line) {
      report("divergent-barrier", line, me.name() + " is here while " + lane->name() + " waits at " + place(lane->at));
      abort_block();
    }
  if (++b.waiting < b.threads) return wait_in(State::at_barrier, line);
  b.waiting = 0;
  ++b.epoch, ++counters().barriers;
  for (Warp& w : b.warps) ++w.epoch;
  for (auto& lane : b.lanes)
    if (lane->state == State::at_barrier) make_ready(*lane);
}

void meet(const char* what, void* slot, Line line, const std::function<void(Meeting&)>& run) {
  Warp& w = current->warp();
  Lane& me = *current->now;
  if (w.live != w.present) {
    report("missing-lane", line, me.name() + " is in " + what + " without the whole of its warp");
    abort_block();
  }
  Meeting& meeting = w.meeting;
  if (meeting.arrived == 0) {
    meeting.what = what, meeting.line = line;
  } else if (meeting.line.line != line.line || std::strcmp(meeting.what, what) != 0) {
    report("divergent-warp", line,
           me.name() + " is in " + what + " while its warp waits in " + meeting.what + " at " + place(meeting.line));
    abort_block();
  }
  meeting.slot[me.lane()] = slot;
  meeting.arrived |= 1u << me.lane();
  if (meeting.arrived != w.present) return wait_in(State::in_warp, line);
  run(meeting);
  meeting.arrived = 0;
  for (uint32_t rest = w.present & ~(1u << me.lane()); rest; rest &= rest - 1)
    make_ready(current->lane(me.warp(), std::countr_zero(rest)));
}

void sync_warp(Line line) {
  meet("sync_warp", nullptr, line, [](Meeting&) { ++current->warp().epoch; });
}

uint64_t shuffle_xor(uint64_t value, int mask, Line line) {
  struct Slot {
    uint64_t in, out;
    int mask;
  } slot{value, 0, mask};
  meet("shuffle_xor", &slot, line, [](Meeting& m) {
    for (int lane = 0; lane < 32; ++lane) {
      Slot& mine = *static_cast<Slot*>(m.slot[lane]);
      mine.out = static_cast<Slot*>(m.slot[lane ^ mine.mask])->in;
    }
  });
  return slot.out;
}

uint32_t ballot(bool x, Line line) {
  struct Slot {
    bool in;
    uint32_t out;
  } slot{x, 0};
  meet("ballot", &slot, line, [](Meeting& m) {
    uint32_t bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= uint32_t(static_cast<Slot*>(m.slot[lane])->in) << lane;
    for (void* one : m.slot) static_cast<Slot*>(one)->out = bits;
  });
  return slot.out;
}

}  // namespace gpu_model
