// Starts the kernels in plain arithmetic.
#include "cuda/kernels.h"
#include "cuda/simt_launch.h"
#include "kernels/cuda/simt_dropout.cuh"

namespace attention_ops {

using device::launch;

void simt_forward(const Problem& p, const ForwardResult& result, Stream stream) {
  const Index parts = parts_of(p.value_width), tiles = tiles_of(p.queries, kSimtTile);
  const Index tasks = p.batch * p.heads * tiles * parts;
  in_compute_type(p, [&]<class T>() {
    launch(simt_forward_kernel<T>, blocks_for(p, tasks), kSimtThreads, SimtMemory<T>::kBytes, stream, p, result, parts,
           tiles, tasks);
  });
}

void simt_prepare(const Problem& p, const BackwardInput& in, Stream stream) {
  const Index tiles = tiles_of(p.queries, kSimtTile), tasks = p.batch * p.heads * tiles;
  in_compute_type(p, [&]<class T>() {
    launch(simt_prepare_kernel<T>, tasks, kSimtThreads, SimtMemory<T>::kBytes, stream, p, in, tiles, tasks);
  });
}

void simt_backward(const Problem& p, const BackwardInput& in, const BackwardResult& result, Stream stream) {
  start_backward(p, in, Still(), result, stream);
}

void simt_bias(const Problem& p, const BackwardInput& in, const Tensor4& grad, const BiasPlan& plan, Stream stream) {
  start_bias(p, in, Still(), grad, plan, stream);
}

void simt_distance(const Problem& p, const BackwardInput& in, const Tensor4& grad, const DistancePlan& plan,
                   Stream stream) {
  start_distance(p, in, Still(), grad, plan, stream);
}

void simt_sinks(const Problem& p, const BackwardInput& in, void* grad_sinks, Stream stream) {
  start_sinks(p, in, Still(), grad_sinks, stream);
}

void simt_dropout(const DropoutMask& p, Stream stream) {
  const Index groups = tiles_of(p.keys, 8), tasks = p.batch * p.heads * p.queries * groups;
  launch(simt_dropout_kernel, tiles_of(tasks, kSimtThreads), kSimtThreads, 0, stream, p, groups, tasks);
}

}  // namespace attention_ops
