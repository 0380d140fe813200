// What a whole warp does together: shuffles, votes, barriers of the warp, matrices.
#include <stdexcept>

#include "kernels/view.h"
#include "ptx/warp.h"

namespace gpu_model::ptx {
namespace {

void need_all(const Warp& w, const Instruction& in, int members, uint32_t lanes) {
  if (uint32_t(w.source(in, members)[std::countr_zero(lanes)]) != ~0u)
    throw std::runtime_error("a part of a warp alone: " + in.text);
}

void sync_warp(Warp& w, const Instruction& in, uint32_t lanes) {
  need_all(w, in, 0, lanes);
  ++w.block.warps[w.number].epoch;
}

// The value, and whether there is such a lane; sources are the value, the mask of lanes, the bounds, the members.
void shuffle_xor(Warp& w, const Instruction& in, uint32_t lanes) {
  const Row from = w.source(in, 0);  // may be the result too
  const Row &by = w.source(in, 1), &bounds = w.source(in, 2);
  need_all(w, in, 3, lanes);
  if (bounds[0] != 31) throw std::runtime_error("a shuffle of a part of a warp: " + in.text);
  w.set(in, 0, lanes, [&](int i) { return uint32_t(from[(i ^ int(by[i])) & 31]); });
  if (in.to.size() > 1) w.set(in, 1, lanes, [](int) { return true; });
}
void ballot(Warp& w, const Instruction& in, uint32_t lanes) {
  need_all(w, in, 1, lanes);
  uint32_t bits = 0;
  each_lane(lanes, [&](int i) { bits |= uint32_t(w.source(in, 0)[i] != 0) << i; });
  w.set(in, 0, lanes, [&](int) { return bits; });
}

template <bool Transposed>
void load_matrices(Warp& w, const Instruction& in, uint32_t lanes) {
  uint32_t addresses[32], out[32][4];
  for (int i = 0; i < 32; ++i) addresses[i] = uint32_t(w.source(in, 0)[i] + in.offset[0]);
  current->now = &w.lane(0);
  load_matrices_of_warp(out, addresses, Transposed, in.line);
  for (int n = 0; n < 4; ++n) w.set(in, n, lanes, [&](int i) { return out[i][n]; });
}

// d [16, 8] = a [16, 16] b [16, 8] + c; sources are four registers of a, two of b, four of c.
template <class E>
void multiply_add(Warp& w, const Instruction& in, uint32_t lanes) {
  WarpProduct product;
  for (int i = 0; i < 32; ++i) {
    for (int n = 0; n < 4; ++n) product.a[i][n] = uint32_t(w.source(in, n)[i]);
    for (int n = 0; n < 2; ++n) product.b[i][n] = uint32_t(w.source(in, 4 + n)[i]);
    for (int n = 0; n < 4; ++n) product.d[i][n] = value<float>(w.source(in, 6 + n)[i]);
  }
  product.multiply_add([](uint16_t bits) -> float { return E{bits}; });
  for (int n = 0; n < 4; ++n) w.set(in, n, lanes, [&](int i) { return product.d[i][n]; });
}

}  // namespace

Execute across_warp(const Opcode& opcode) {
  const std::string& name = opcode.name;
  if (name == "bar.warp.sync") return sync_warp;
  if (name == "shfl.sync.bfly") return shuffle_xor;
  if (name == "vote.sync.ballot") return ballot;
  if (name == "ldmatrix.sync.aligned.m8n8.x4.shared") return load_matrices<false>;
  if (name == "ldmatrix.sync.aligned.m8n8.x4.trans.shared") return load_matrices<true>;
  if (name != "mma.sync.aligned.m16n8k16.row.col") return nullptr;
  if (opcode.types == std::vector{Type::f32, Type::bf16, Type::bf16, Type::f32})
    return multiply_add<attention_ops::BFloat16>;
  if (opcode.types == std::vector{Type::f32, Type::f16, Type::f16, Type::f32})
    return multiply_add<attention_ops::Float16>;
  return nullptr;
}

}  // namespace gpu_model::ptx
