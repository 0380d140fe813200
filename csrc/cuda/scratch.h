// Scratch memory, from torch's allocator, and the sums that need it in every backward pass.
#pragma once
#include <ATen/ops/empty.h>

#include "cuda/arguments.h"

namespace attention_ops {

inline Tensor scratch(const Tensor& like, at::IntArrayRef sizes, at::ScalarType type) {
  return at::empty(sizes, like.options().dtype(type));
}

// The gradient of a bias, with sums of a type. `source` says what else the weights' gradient comes from.
template <class... Source>
void bias_gradient(const Call& call, const Problem& p, const BackwardInput& in, const Tensor& grad, at::ScalarType type,
                   const Source&... source) {
  if (!grad.defined() || grad.numel() == 0) return;
  BiasPlan plan(p, result_view4(grad));
  Tensor sums;
  if (plan.shares > 1) sums = scratch(grad, {plan.shares, grad.numel()}, type);
  plan.sums = pointer(call, sums);
  simt_bias(p, in, source..., result(call, grad), plan, call.stream());
}

}  // namespace attention_ops
