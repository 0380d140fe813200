// Starts the kernels of forward mode and of second derivatives.
#include "cuda/kernels.h"
#include "cuda/simt_launch.h"
#include "kernels/cuda/simt_jvp.cuh"
#include "kernels/cuda/simt_second.cuh"

namespace attention_ops {

void simt_jvp(const Problem& p, const BackwardInput& in, const Tangents& along, const ForwardResult& result,
              Stream stream) {
  const Index parts = parts_of(p.value_width), tiles = tiles_of(p.queries, kSimtTile);
  const Index tasks = p.batch * p.heads * tiles * parts;
  in_compute_type(p, [&]<class T>() {
    device::launch(simt_jvp_kernel<T>, tasks, kSimtThreads, SimtMemory<T>::kBytes, stream, p, in, along, result, parts,
                   tiles, tasks);
  });
}

void simt_delta_tangent(const Problem& p, const BackwardInput& in, const BackwardTangent& along, Stream stream) {
  const Index tiles = tiles_of(p.queries, kSimtTile), tasks = p.batch * p.heads * tiles;
  in_compute_type(p, [&]<class T>() {
    device::launch(simt_delta_tangent_kernel<T>, tasks, kSimtThreads, 0, stream, p, in, along, tiles, tasks);
  });
}

void simt_backward(const Problem& p, const BackwardInput& in, const BackwardTangent& along,
                   const BackwardResult& result, Stream stream) {
  start_backward(p, in, along, result, stream);
}

void simt_bias(const Problem& p, const BackwardInput& in, const BackwardTangent& along, const Tensor4& grad,
               const BiasPlan& plan, Stream stream) {
  start_bias(p, in, along, grad, plan, stream);
}

void simt_distance(const Problem& p, const BackwardInput& in, const BackwardTangent& along, const Tensor4& grad,
                   const DistancePlan& plan, Stream stream) {
  start_distance(p, in, along, grad, plan, stream);
}

void simt_sinks(const Problem& p, const BackwardInput& in, const BackwardTangent& along, void* grad_sinks,
                Stream stream) {
  start_sinks(p, in, along, grad_sinks, stream);
}

}  // namespace attention_ops
