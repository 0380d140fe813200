// A warp of the interpreter: registers as rows of 32 lanes, and where each lane is.
#pragma once
#include <array>
#include <bit>
#include <cstring>

#include "ptx/program.h"
#include "state.h"

namespace gpu_model::ptx {

using Row = std::array<uint64_t, 32>;

// A register's low bytes as a value, and back. Signed numbers fill the whole register.
template <class T>
T value(uint64_t bits) {
  if constexpr (std::is_same_v<T, bool>) return bits != 0;
  T x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
template <class T>
uint64_t bits_of(T x) {
  if constexpr (std::is_integral_v<T>) return static_cast<uint64_t>(x);
  uint64_t bits = 0;
  std::memcpy(&bits, &x, sizeof x);
  return bits;
}

// Generic addresses of what is not global memory: those of no process.
constexpr uint64_t kSharedSegment = uint64_t(1) << 56, kLocalSegment = uint64_t(2) << 56,
                   kParameterSegment = uint64_t(3) << 56, kSegments = uint64_t(0xff) << 56;

template <class F>
void each_lane(uint32_t lanes, F&& f) {
  if (lanes == ~0u)
    for (int lane = 0; lane < 32; ++lane) f(lane);
  else
    for (; lanes; lanes &= lanes - 1) f(std::countr_zero(lanes));
}

struct Warp {
  Block& block;
  const Program& program;
  int number;
  std::vector<Row> registers;
  std::vector<uint32_t> written;  // for each register, the lanes in which it holds something
  std::vector<unsigned char> frames;
  const std::vector<unsigned char>& parameters;
  int pc[32] = {};
  std::vector<int> calls[32];                   // where a lane goes back to
  uint32_t live, together = 0, at_barrier = 0;  // lanes that wait for their warp, or for the block

  Warp(Block& block, const Program& program, const std::vector<unsigned char>& parameters, int number);

  Lane& lane(int n) const { return block.lane(number, n); }
  unsigned char* frame(int lane) { return &frames[size_t(lane) * program.frame_bytes]; }
  const Row& source(const Instruction& in, int n) const { return registers[in.from[n]]; }

  // The nth result of the lanes, lane by lane.
  template <class F>
  void set(const Instruction& in, int n, uint32_t lanes, F&& f) {
    Row& row = registers[in.to[n]];
    each_lane(lanes, [&](int lane) { row[lane] = bits_of(f(lane)); });
  }
};

}  // namespace gpu_model::ptx
