// Starts the kernels of rotary positions.
#include "cuda/kernels.h"
#include "kernels/cuda/simt_rope.cuh"

namespace attention_ops {
namespace {

Index blocks_of_warps(Index warps) {
  return tiles_of(warps, kSimtThreads / 32);
}

}  // namespace

void simt_rope_table(const RopeTableProblem& p, const RopeAxes& axes, Stream stream) {
  const Index blocks = blocks_of_warps(p.batch * p.length);
  const auto kernel = p.is_double ? simt_rope_table_kernel<double> : simt_rope_table_kernel<float>;
  device::launch(kernel, blocks, kSimtThreads, 0, stream, p, axes);
}

void simt_rope(const RopeProblem& p, Stream stream) {
  const Index blocks = blocks_of_warps(p.x.sizes[0] * p.x.sizes[1] * p.x.sizes[2]);
  with_element(p.x.element,
               [&]<class E>(E*) { device::launch(simt_rope_kernel<E>, blocks, kSimtThreads, 0, stream, p); });
}

}  // namespace attention_ops
