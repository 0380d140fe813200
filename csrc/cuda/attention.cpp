// Attention on CUDA: forward, backward, and the tangents of both. Scratch comes from torch's allocator, and all work
// goes to its stream.
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include "cuda/operators.h"
#include "cuda/scratch.h"
#include "ops/allocate.h"

namespace attention_ops {
namespace {

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
  Tensor query, key, value, bias, distance, sinks;
  at::ScalarType type;  // of sums

  Gradients(const Attention& a, std::array<bool, 6> needed, bool on_tensor_cores) : type(lse_type(a.query)) {
    if (needed[0]) query = empty_aligned(a.query, on_tensor_cores);
    if (needed[1]) key = empty_aligned(a.key, on_tensor_cores);
    if (needed[2]) value = empty_aligned(a.value, on_tensor_cores);
    if (needed[3] && a.bias) bias = empty_like_shape(*a.bias);
    if (needed[4] && a.distance) distance = empty_like_shape(*a.distance);
    if (needed[5] && a.sinks) sinks = scratch(*a.sinks, a.sinks->sizes(), type);
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
    return {rows(query, a.query),
            rows(key, a.key),
            rows(value, a.value),
            one(bias, a.bias.value_or(a.query)),
            one(distance, a.distance.value_or(a.query)),
            one(sinks, a.sinks.value_or(a.query))};
  }
};

// What a backward pass reads and prepares for each row, with the tensors that it points into.
class LoadedRows {
 public:
  LoadedRows(const Call& call, const Loaded& loaded, In out, In lse)
      : out_(call, out, false),
        lse_(call, lse, lse.scalar_type()),
        norm_(scratch(lse, {2, loaded.problem.rows()}, lse.scalar_type())) {
    in.out = out_.view(), in.lse = lse_.data();
    in.base = pointer(call, norm_[0]), in.log2_l = pointer(call, norm_[1]);
  }
  LoadedRows(const LoadedRows&) = delete;

  void take_gradients(const Call& call, const Loaded& loaded, In out, In lse, Opt grad_out, Opt grad_lse) {
    grad_out_.emplace(call, grad_out ? *grad_out : at::zeros({1}, out.options()).expand_as(out),
                      loaded.on_tensor_cores);
    grad_lse_.emplace(call, grad_lse, lse.scalar_type());
    delta_ = at::empty_like(norm_[0]);
    in.grad_out = grad_out_->view(), in.grad_lse = grad_lse_->data(), in.delta = pointer(call, delta_);
  }

  BackwardInput in{};

 private:
  Operand out_;
  Numbers lse_;
  std::optional<Operand> grad_out_;
  std::optional<Numbers> grad_lse_;
  Tensor norm_, delta_;
};

// The sums over rows of all batches: of a bias, of rows by distance, and of the sinks. In a second derivative, along a
// direction.
template <class... Along>
void sum_gradients(const Call& call, const Problem& p, const BackwardInput& in, const Gradients& grads,
                   const Along&... along) {
  bias_gradients(call, p, in, grads.bias, grads.distance, grads.type, along...);
  if (grads.sinks.defined()) simt_sinks(p, in, along..., pointer(call, grads.sinks), call.stream());
}

// Few rows over many keys.
void decode(const Call& call, const Problem& p, const ForwardResult& to, In lse) {
  DecodePlan plan(p);
  const Tensor rows = scratch(lse, {2, plan.all_rows(p)}, lse.scalar_type());  // m, l
  const Tensor o = scratch(lse, {plan.all_rows(p), p.value_width}, lse.scalar_type());
  plan.m = pointer(call, rows[0]), plan.l = pointer(call, rows[1]), plan.o = pointer(call, o);
  simt_decode(p, plan, to, call.stream());
}

// Of out and lse, from what simt_prepare found.
Pair tangents_of(const Call& call, const Problem& p, const BackwardInput& in, const Tangents& along, In lse,
                 at::ScalarType type) {
  const Tensor out_t = empty_heads(lse.options().dtype(type), p.batch, p.heads, p.queries, p.value_width);
  const Tensor lse_t = scratch(lse, lse.sizes(), lse.scalar_type());
  simt_jvp(p, in, along, {result(call, out_t), pointer(call, lse_t)}, call.stream());
  return {out_t, lse_t};
}

}  // namespace

Pair forward_cuda(const Attention& a) {
  const Call call(a.query);
  const bool few_rows = is_decode(a.query.size(1), a.key.size(1), a.query.size(2)) && a.query.size(3) <= kDecodeWidth &&
                        !has_rows_by_distance(a);
  const Loaded loaded(call, a, on_tensor_cores(a) && !few_rows);
  const Problem& p = loaded.problem;
  const int64_t width = loaded.on_tensor_cores ? aligned_width(a.value) : p.value_width;
  const Tensor out = empty_heads(a.query.options(), p.batch, p.heads, p.queries, width);
  const Tensor lse = scratch(a.query, {p.batch, p.heads, p.queries}, lse_type(a.query));
  const ForwardResult to{result(call, out), pointer(call, lse)};
  if (!loaded.on_tensor_cores) {
    few_rows ? decode(call, p, to, lse) : simt_forward(p, to, call.stream());
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
  const Loaded loaded(call, a, on_tensor_cores(a));
  const Problem& p = loaded.problem;
  LoadedRows rows(call, loaded, out, lse);
  rows.take_gradients(call, loaded, out, lse, grad_out, grad_lse);
  const Tensor flag = loaded.on_tensor_cores ? lowered_flag(a.query) : Tensor();
  rows.in.inexact = flag_pointer(call, flag);
  const Gradients grads(a, needed, loaded.on_tensor_cores);
  const BackwardResult to = grads.view(call);
  simt_prepare(p, rows.in, call.stream());
  if (rows.in.inexact) {
    if (grads.key.defined() || grads.value.defined()) tensor_keys(p, rows.in, to, call.stream());
    if (grads.query.defined()) tensor_queries(p, rows.in, to.grad_query, call.stream());
  }
  simt_backward(only_if(p, rows.in.inexact), rows.in, to, call.stream());
  sum_gradients(call, p, rows.in, grads);
  return grads.finished(a);
}

Pair jvp_cuda(const Attention& a, In out, In lse, Opt query_t, Opt key_t, Opt value_t, Opt bias_t, Opt distance_t,
              Opt sinks_t) {
  const Call call(a.query);
  const Loaded loaded(call, a, /*on_tensor_cores=*/false);
  const LoadedRows rows(call, loaded, out, lse);
  const LoadedTangents along(call, lse, query_t, key_t, value_t, bias_t, distance_t, sinks_t);
  simt_prepare(loaded.problem, rows.in, call.stream());
  return tangents_of(call, loaded.problem, rows.in, along.view, lse, out.scalar_type());
}

Eight double_backward_cuda(const Attention& a, In out, In lse, Opt grad_out, Opt grad_lse, Opt query_t, Opt key_t,
                           Opt value_t, Opt bias_t, Opt distance_t, Opt sinks_t, Opt grad_out_t, Opt grad_lse_t,
                           std::array<bool, 8> needed) {
  const Call call(a.query);
  const Loaded loaded(call, a, /*on_tensor_cores=*/false);
  const Problem& p = loaded.problem;
  LoadedRows rows(call, loaded, out, lse);
  rows.take_gradients(call, loaded, out, lse, grad_out, grad_lse);
  const LoadedTangents inputs(call, lse, query_t, key_t, value_t, bias_t, distance_t, sinks_t);
  simt_prepare(p, rows.in, call.stream());
  // What forward mode may have counted already, but out and lse come without their tangents.
  const auto [out_t, lse_t] = tangents_of(call, p, rows.in, inputs.view, lse, lse.scalar_type());
  const Numbers grad_lse_rows(call, grad_lse_t, lse.scalar_type());
  const Tensor delta = at::empty_like(lse_t);
  BackwardTangent along{inputs.view, read_view(out_t), read(call, grad_out_t), grad_lse_rows.data(),
                        pointer(call, delta)};
  along.of.lse = lse_t.const_data_ptr();
  simt_delta_tangent(p, rows.in, along, call.stream());
  const Gradients grads(a, {needed[0], needed[1], needed[2], needed[3], needed[4], needed[5]}, false);
  simt_backward(p, rows.in, along, grads.view(call), call.stream());
  sum_gradients(call, p, rows.in, grads, along);
  const auto [query, key, value, bias, distance, sinks] = grads.finished(a);
  return {query,
          key,
          value,
          bias,
          distance,
          sinks,
          needed[6] ? out_t.to(out.scalar_type()) : nothing(out),
          needed[7] ? lse_t : nothing(lse)};
}

}  // namespace attention_ops
