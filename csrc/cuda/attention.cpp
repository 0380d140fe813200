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

// A flag that a kernel on tensor cores raises where its result will not do; the plain kernels follow, and do nothing
// unless it is raised. No value comes back to the host.
Tensor lowered_flag(const Tensor& like) {
  return at::zeros({1}, like.options().dtype(at::kInt));
}
int* flag_pointer(const Call& call, const Tensor& flag) {
  return flag.defined() ? call.updates(flag).mutable_data_ptr<int>() : nullptr;
}
Problem only_if(const Problem& problem, const int* flag) {
  Problem exact = problem;
  exact.only_if = flag;
  return exact;
}

// Gradients of one call; undefined where nobody asked.
struct Gradients {
  Tensor query, key, value, bias, sinks;

  Gradients(const Attention& a, std::array<bool, 6> needed, bool on_tensor_cores) {
    if (needed[0]) query = empty_aligned(a.query, on_tensor_cores);
    if (needed[1]) key = empty_aligned(a.key, on_tensor_cores);
    if (needed[2]) value = empty_aligned(a.value, on_tensor_cores);
    if (needed[3] && a.bias) bias = empty_like_shape(*a.bias);
    if (needed[5] && a.sinks) sinks = scratch(*a.sinks, a.sinks->sizes(), lse_type(a.query));
  }
  BackwardResult view(const Call& call) const {
    return {result(call, query), result(call, key), result(call, value), result(call, bias), pointer(call, sinks)};
  }
  // In its own tensor's type; a gradient that was not asked for is empty.
  Six finished(const Attention& a) const {
    const auto rows = [](const Tensor& x, const Tensor& like) {
      return x.defined() ? without_filling(x, like.size(3)) : nothing(like);
    };
    const auto one = [](const Tensor& x, const Tensor& like) {
      return x.defined() ? x.to(like.scalar_type()) : nothing(like);
    };
    return {rows(query, a.query), rows(key, a.key),
            rows(value, a.value), one(bias, a.bias.value_or(a.query)),
            nothing(a.query),     one(sinks, a.sinks.value_or(a.query))};
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
  const int64_t width = loaded.on_tensor_cores ? aligned_width(a.value) : p.value_width;
  const Tensor out = empty_heads(a.query.options(), p.batch, p.heads, p.queries, width);
  const Tensor lse = scratch(a.query, {p.batch, p.heads, p.queries}, lse_type(a.query));
  const ForwardResult to{result(call, out), pointer(call, lse)};
  if (!loaded.on_tensor_cores) {
    simt_forward(p, to, call.stream());
    return {out, lse};
  }
  const Tensor flag = loaded.hides() ? lowered_flag(a.query) : Tensor();
  int* inexact = flag_pointer(call, flag);
  tensor_forward(p, to, inexact, call.stream());
  if (inexact) simt_forward(only_if(p, inexact), to, call.stream());
  return {without_filling(out, p.value_width), lse};
}

Six backward_cuda(const Attention& a, In out, In lse, Opt grad_out, Opt grad_lse, std::array<bool, 6> needed) {
  const Call call(a.query);
  const Loaded loaded(call, a);
  const Problem& p = loaded.problem;
  const at::ScalarType type = lse_type(a.query);
  const Gradients grads(a, needed, loaded.on_tensor_cores);
  const Operand out_rows(call, out, false);
  const Operand grad_rows(call, grad_out ? *grad_out : at::zeros({1}, out.options()).expand_as(out),
                          loaded.on_tensor_cores);
  const Numbers lse_rows(call, lse, type), grad_lse_rows(call, grad_lse, type);
  const Tensor rows = scratch(a.query, {3, p.rows()}, type);  // base, log2_l, delta
  const Tensor flag = loaded.on_tensor_cores ? lowered_flag(a.query) : Tensor();
  const BackwardInput in{out_rows.view(),        grad_rows.view(),        lse_rows.data(),
                         grad_lse_rows.data(),   pointer(call, rows[0]),  pointer(call, rows[1]),
                         pointer(call, rows[2]), flag_pointer(call, flag)};
  const BackwardResult to = grads.view(call);
  simt_prepare(p, in, call.stream());
  if (in.inexact) {
    if (grads.key.defined() || grads.value.defined()) tensor_keys(p, in, to, call.stream());
    if (grads.query.defined()) tensor_queries(p, in, to.grad_query, call.stream());
  }
  simt_backward(only_if(p, in.inexact), in, to, call.stream());
  if (grads.bias.defined() && grads.bias.numel() > 0) bias_gradient(call, p, in, grads.bias, type);
  if (grads.sinks.defined()) simt_sinks(p, in, to.grad_sinks, call.stream());
  return grads.finished(a);
}

}  // namespace attention_ops
