// Starts the backward kernels in plain arithmetic, in a first or a second derivative, and what all starts share.
#pragma once
#include "kernels/cuda/simt_bias.cuh"
#include "kernels/cuda/simt_distance.cuh"

namespace attention_ops {

// Calls f<T>() with the type that scores are computed in.
template <class F>
void in_compute_type(const Problem& p, F&& f) {
  p.q.element == Element::float64 ? f.template operator()<double>() : f.template operator()<float>();
}

// A launch that usually finds nothing to do is small; its blocks share the tasks.
inline Index blocks_for(const Problem& p, Index tasks) {
  return p.only_if ? std::min<Index>(tasks, 512) : tasks;
}

inline Index parts_of(Index width) {
  return std::max<Index>(tiles_of(width, kSimtTile), 1);
}

template <class T, class Along>
void start_keys(const Problem& p, const BackwardInput& in, const Along& along, const BackwardResult& result,
                Stream stream) {
  const Index key_parts = result.grad_key.defined() ? parts_of(p.width) : 1;
  const Index value_parts = result.grad_value.defined() ? parts_of(p.value_width) : 1;
  const Index parts = std::max(key_parts, value_parts), tiles = tiles_of(p.keys, kSimtTile);
  const Index tasks = p.batch * p.key_heads * tiles * parts;
  device::launch(simt_keys_kernel<T, Along>, blocks_for(p, tasks), kSimtThreads, SimtMemory<T>::kBytes, stream, p, in,
                 along, result, parts, tiles, tasks);
}

template <class T, class Along>
void start_queries(const Problem& p, const BackwardInput& in, const Along& along, const BackwardResult& result,
                   Stream stream) {
  const Index parts = result.grad_query.defined() ? parts_of(p.width) : 1, tiles = tiles_of(p.queries, kSimtTile);
  const Index tasks = p.batch * p.heads * tiles * parts;
  device::launch(simt_queries_kernel<T, Along>, blocks_for(p, tasks), kSimtThreads, SimtMemory<T>::kBytes, stream, p,
                 in, along, result, parts, tiles, tasks);
}

template <class Along>
void start_backward(const Problem& p, const BackwardInput& in, const Along& along, const BackwardResult& result,
                    Stream stream) {
  in_compute_type(p, [&]<class T>() {
    if (result.grad_key.defined() || result.grad_value.defined()) start_keys<T>(p, in, along, result, stream);
    if (result.grad_query.defined() || result.grad_lse) start_queries<T>(p, in, along, result, stream);
  });
}

// A gradient whose sums may be cut into shares.
template <class T, class Along, class Plan>
void start_shares(void (*kernel)(Problem, BackwardInput, Along, Tensor4, Plan), const Problem& p,
                  const BackwardInput& in, const Along& along, const Tensor4& grad, const Plan& plan, Stream stream) {
  const Index places = grad.sizes[0] * grad.sizes[1] * grad.sizes[2] * grad.sizes[3];
  device::launch(kernel, plan.tasks(), kSimtThreads, SimtMemory<T>::kBytes, stream, p, in, along, grad, plan);
  if (plan.sums)
    device::launch(simt_shares_kernel<T>, tiles_of(places, kSimtThreads), kSimtThreads, 0, stream, grad, plan.sums,
                   plan.shares, places);
}

template <class Along>
void start_bias(const Problem& p, const BackwardInput& in, const Along& along, const Tensor4& grad,
                const BiasPlan& plan, Stream stream) {
  in_compute_type(p, [&]<class T>() { start_shares<T>(simt_bias_kernel<T, Along>, p, in, along, grad, plan, stream); });
}

template <class Along>
void start_distance(const Problem& p, const BackwardInput& in, const Along& along, const Tensor4& grad,
                    const DistancePlan& plan, Stream stream) {
  in_compute_type(
      p, [&]<class T>() { start_shares<T>(simt_distance_kernel<T, Along>, p, in, along, grad, plan, stream); });
}

template <class Along>
void start_sinks(const Problem& p, const BackwardInput& in, const Along& along, void* grad_sinks, Stream stream) {
  in_compute_type(p, [&]<class T>() {
    device::launch(simt_sinks_kernel<T, Along>, p.heads, kSimtThreads, kSimtThreads * int(sizeof(T)), stream, p, in,
                   along, grad_sinks);
  });
}

}  // namespace attention_ops
