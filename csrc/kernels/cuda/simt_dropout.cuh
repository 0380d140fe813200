// Which weights dropout keeps, written out: a thread takes eight neighbouring keys.
#pragma once
#include "kernels/cuda/site.cuh"

namespace attention_ops {

static __global__ void __launch_bounds__(kSimtThreads)
    simt_dropout_kernel(const __grid_constant__ DropoutMask p, Index groups, Index tasks) {
  for (Index task = device::block() * kSimtThreads + device::thread(); task < tasks;
       task += device::blocks() * kSimtThreads) {
    const Index group = task % groups, row = task / groups, bh = row / p.queries;
    const DropoutStream stream = p.dropout.stream(bh / p.heads, bh % p.heads);
    const Philox random = stream.eight(uint32_t(row % p.queries), uint32_t(group));
    for (int n = 0; n < 8 && group * 8 + n < p.keys; ++n)
      device::store(p.kept + row * p.keys + group * 8 + n, stream.keeps(random, n));
  }
}

}  // namespace attention_ops
