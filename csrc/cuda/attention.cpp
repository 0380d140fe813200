// Attention on CUDA: forward and backward. Scratch comes from torch's allocator, and all work goes to its stream.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "cuda/arguments.h"
#include "cuda/operators.h"
#include "ops/allocate.h"

namespace attention_ops {
namespace {

Tensor scratch(const Tensor& like, at::IntArrayRef sizes, at::ScalarType type) {
  return at::empty(sizes, like.options().dtype(type));
}

// Gradients of one call; undefined where nobody asked.
struct Gradients {
  Tensor query, key, value, bias, sinks;

  Gradients(const Attention& a, std::array<bool, 5> needed) {
    if (needed[0]) query = empty_heads_like(a.query);
    if (needed[1]) key = empty_heads_like(a.key);
    if (needed[2]) value = empty_heads_like(a.value);
    if (needed[3] && a.bias) bias = empty_like_shape(*a.bias);
    if (needed[4] && a.sinks) sinks = scratch(*a.sinks, a.sinks->sizes(), lse_type(a.query));
  }
  BackwardResult view(const Call& call) const {
    return {result(call, query), result(call, key), result(call, value), result(call, bias), pointer(call, sinks)};
  }
  // In its own tensor's type; a gradient that was not asked for is empty.
  Five finished(const Attention& a) const {
    const auto one = [](const Tensor& x, const Tensor& like) {
      return x.defined() ? x.to(like.scalar_type()) : nothing(like);
    };
    return {one(query, a.query), one(key, a.key), one(value, a.value), one(bias, a.bias.value_or(a.query)),
            one(sinks, a.sinks.value_or(a.query))};
  }
};

void bias_gradient(const Call& call, const Problem& problem, const BackwardInput& in, const Tensor& grad,
                   at::ScalarType type) {
  BiasPlan plan(problem, result_view4(grad));
  Tensor sums;
  if (plan.shares > 1) sums = scratch(grad, {plan.shares, grad.numel()}, type);
  plan.sums = pointer(call, sums);
  simt_bias(problem, in, result(call, grad), plan, call.stream());
}

}  // namespace

Pair forward_cuda(const Attention& a) {
  const Call call(a.query);
  const Loaded loaded(call, a);
  const Problem& p = loaded.problem;
  const Tensor out = empty_heads(a.query.options(), p.batch, p.heads, p.queries, p.value_width);
  const Tensor lse = scratch(a.query, {p.batch, p.heads, p.queries}, lse_type(a.query));
  simt_forward(p, {result(call, out), pointer(call, lse)}, call.stream());
  return {out, lse};
}

Five backward_cuda(const Attention& a, In out, In lse, Opt grad_out, Opt grad_lse, std::array<bool, 5> needed) {
  const Call call(a.query);
  const Loaded loaded(call, a);
  const Problem& p = loaded.problem;
  const at::ScalarType type = lse_type(a.query);
  const Gradients grads(a, needed);
  const Tensor grad_rows = grad_out ? *grad_out : at::zeros({1}, out.options()).expand_as(out);
  const Numbers lse_rows(call, lse, type), grad_lse_rows(call, grad_lse, type);
  const Tensor rows = scratch(a.query, {3, p.rows()}, type);  // base, log2_l, delta
  const BackwardInput in{read_view(call.reads(out)), read_view(call.reads(grad_rows)), lse_rows.data(),
                         grad_lse_rows.data(),       pointer(call, rows[0]),           pointer(call, rows[1]),
                         pointer(call, rows[2])};
  simt_prepare(p, in, call.stream());
  simt_backward(p, in, grads.view(call), call.stream());
  if (grads.bias.defined() && grads.bias.numel() > 0) bias_gradient(call, p, in, grads.bias, type);
  if (grads.sinks.defined()) simt_sinks(p, in, pointer(call, grads.sinks), call.stream());
  return grads.finished(a);
}

}  // namespace attention_ops
