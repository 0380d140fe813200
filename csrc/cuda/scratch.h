// Scratch memory, from torch's allocator, and the sums that need it in every backward pass.
#pragma once
#include <ATen/ops/empty.h>

#include "cuda/arguments.h"

namespace attention_ops {

inline Tensor scratch(const Tensor& like, at::IntArrayRef sizes, at::ScalarType type) {
  return at::empty(sizes, like.options().dtype(type));
}

// Calls start(plan) for a gradient whose sums, of a type, may be cut into shares; gives the memory of those.
template <class Plan, class F>
Tensor in_shares(const Call& call, const Problem& p, const Tensor& grad, at::ScalarType type, F&& start) {
  if (!grad.defined() || grad.numel() == 0) return {};
  Plan plan(p, result_view4(grad));
  Tensor sums;
  if (plan.shares > 1) sums = scratch(grad, {plan.shares, grad.numel()}, type);
  plan.sums = pointer(call, sums);
  start(plan);
  return sums;
}

// The gradients of a bias and of rows by distance. `source` says what else the weights' gradient comes from.
template <class... Source>
void bias_gradients(const Call& call, const Problem& p, const BackwardInput& in, const Tensor& bias,
                    const Tensor& distance, at::ScalarType type, const Source&... source) {
  // Memory that is watched is not given back before the call ends.
  const Tensor of_bias = in_shares<BiasPlan>(call, p, bias, type, [&](const BiasPlan& plan) {
    simt_bias(p, in, source..., result(call, bias), plan, call.stream());
  });
  const Tensor of_distance = in_shares<DistancePlan>(call, p, distance, type, [&](const DistancePlan& plan) {
    simt_distance(p, in, source..., result(call, distance), plan, call.stream());
  });
}

}  // namespace attention_ops
