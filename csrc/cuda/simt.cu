// Starts the kernels in plain arithmetic.
#include "cuda/kernels.h"
#include "kernels/cuda/simt_bias.cuh"
#include "kernels/cuda/simt_dropout.cuh"

namespace attention_ops {
namespace {

using device::launch;

// Calls f<T>() with the type that scores are computed in.
template <class F>
void in_compute_type(const Problem& p, F&& f) {
  p.q.element == Element::float64 ? f.template operator()<double>() : f.template operator()<float>();
}

// A launch that usually finds nothing to do is small; its blocks share the tasks.
Index blocks_for(const Problem& p, Index tasks) {
  return p.only_if ? std::min<Index>(tasks, 512) : tasks;
}

Index parts_of(Index width) {
  return std::max<Index>(tiles_of(width, kSimtTile), 1);
}

}  // namespace

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
  in_compute_type(p, [&]<class T>() {
    if (result.grad_key.defined() || result.grad_value.defined()) {
      const Index key_parts = result.grad_key.defined() ? parts_of(p.width) : 1;
      const Index value_parts = result.grad_value.defined() ? parts_of(p.value_width) : 1;
      const Index parts = std::max(key_parts, value_parts), tiles = tiles_of(p.keys, kSimtTile);
      const Index tasks = p.batch * p.key_heads * tiles * parts;
      launch(simt_keys_kernel<T>, blocks_for(p, tasks), kSimtThreads, SimtMemory<T>::kBytes, stream, p, in, result,
             parts, tiles, tasks);
    }
    if (result.grad_query.defined()) {
      const Index parts = parts_of(p.width), tiles = tiles_of(p.queries, kSimtTile);
      const Index tasks = p.batch * p.heads * tiles * parts;
      launch(simt_queries_kernel<T>, blocks_for(p, tasks), kSimtThreads, SimtMemory<T>::kBytes, stream, p, in, result,
             parts, tiles, tasks);
    }
  });
}

void simt_bias(const Problem& p, const BackwardInput& in, const Tensor4& grad, const BiasPlan& plan, Stream stream) {
  const Index places = grad.sizes[0] * grad.sizes[1] * grad.sizes[2] * grad.sizes[3];
  in_compute_type(p, [&]<class T>() {
    launch(simt_bias_kernel<T>, plan.tasks(), kSimtThreads, SimtMemory<T>::kBytes, stream, p, in, grad, plan);
    if (plan.sums)
      launch(simt_bias_sum_kernel<T>, tiles_of(places, kSimtThreads), kSimtThreads, 0, stream, grad, plan, places);
  });
}

void simt_sinks(const Problem& p, const BackwardInput& in, void* grad_sinks, Stream stream) {
  in_compute_type(p, [&]<class T>() {
    launch(simt_sinks_kernel<T>, p.heads, kSimtThreads, kSimtThreads * int(sizeof(T)), stream, p, in, grad_sinks);
  });
}

void simt_dropout(const DropoutMask& p, Stream stream) {
  const Index groups = tiles_of(p.keys, 8), tasks = p.batch * p.heads * p.queries * groups;
  launch(simt_dropout_kernel, tiles_of(tasks, kSimtThreads), kSimtThreads, 0, stream, p, groups, tasks);
}

}  // namespace attention_ops
