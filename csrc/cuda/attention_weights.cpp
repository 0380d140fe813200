// Weights and their summaries on CUDA, with their gradients.
#include "cuda/operators.h"
#include "cuda/scratch.h"

namespace attention_ops {
namespace {

// The rows' side of every pass: what turns scores into weights, counted once.
class LoadedNorm {
 public:
  LoadedNorm(const Call& call, const Loaded& loaded, In lse)
      : type(lse.scalar_type()), lse_(call, lse, type), norm_(scratch(lse, {2, loaded.problem.rows()}, type)) {
    in.lse = lse_.data(), in.base = pointer(call, norm_[0]), in.log2_l = pointer(call, norm_[1]);
    simt_prepare(loaded.problem, in, call.stream());
  }
  LoadedNorm(const LoadedNorm&) = delete;

  BackwardInput in{};
  at::ScalarType type;  // of sums

 private:
  Numbers lse_;
  Tensor norm_;
};

// The shared half of all gradients: what is asked for, and the passes.
Five gradients_through(const Call& call, const Loaded& loaded, const Attention& a, In lse, std::array<bool, 5> needed,
                       const WeightGradient& source) {
  const Problem& p = loaded.problem;
  const LoadedNorm norm(call, loaded, lse);
  const Tensor query = needed[0] ? empty_heads_like(a.query) : Tensor();
  const Tensor key = needed[1] ? empty_heads_like(a.key) : Tensor();
  const Tensor bias = needed[2] && a.bias ? empty_like_shape(*a.bias) : Tensor();
  const Tensor grad_lse = needed[4] ? empty_like_shape(lse) : Tensor();
  BackwardResult to{result(call, query), result(call, key), {}, {}};
  to.grad_lse = pointer(call, grad_lse);
  simt_backward(p, norm.in, source, to, call.stream());
  bias_gradient(call, p, norm.in, bias, norm.type, source);
  const auto finished = [](const Tensor& x, const Tensor& like) { return x.defined() ? x : nothing(like); };
  return {finished(query, a.query), finished(key, a.key), finished(bias, a.bias.value_or(a.query)), nothing(a.query),
          finished(grad_lse, lse)};
}

}  // namespace

Tensor weights_cuda(const Attention& a, In lse, Opt heads, Opt rows, c10::SymInt queries, bool average) {
  const Call call(a.query);
  Loaded loaded(call, a, /*on_tensor_cores=*/false);
  loaded.place(call, a, heads, rows, queries.expect_int());
  const Problem& p = loaded.problem;
  const Tensor out = scratch(a.query, {p.batch, average ? 1 : p.heads, p.queries, p.keys}, a.query.scalar_type());
  const LoadedNorm norm(call, loaded, lse);
  simt_weights(p, norm.in, result(call, out), average, call.stream());
  return average ? out.squeeze(1) : out;
}

Five weights_backward_cuda(const Attention& a, In lse, Opt heads, Opt rows, c10::SymInt queries, bool average,
                           In grad_weights, std::array<bool, 5> needed) {
  const Call call(a.query);
  Loaded loaded(call, a, /*on_tensor_cores=*/false);
  loaded.place(call, a, heads, rows, queries.expect_int());
  WeightGradient source;
  source.grad = read_view(call.reads(average ? grad_weights.unsqueeze(1) : grad_weights));
  source.factor = average ? 1. / double(std::max<Index>(loaded.problem.heads, 1)) : 1;
  return gradients_through(call, loaded, a, lse, needed, source);
}

Four summaries_cuda(const Attention& a, In lse) {
  const Call call(a.query);
  const Loaded loaded(call, a, /*on_tensor_cores=*/false);
  const Problem& p = loaded.problem;
  const LoadedNorm norm(call, loaded, lse);
  const Tensor column_sum = scratch(lse, {p.batch, p.heads, p.keys}, norm.type);
  const Tensor entropy = scratch(lse, lse.sizes(), norm.type), maximum = scratch(lse, lse.sizes(), norm.type);
  const Tensor argmax = scratch(lse, lse.sizes(), at::kLong);
  simt_summaries(p, norm.in,
                 {pointer(call, column_sum), pointer(call, entropy), pointer(call, maximum),
                  static_cast<Index*>(pointer(call, argmax))},
                 call.stream());
  return {column_sum, entropy, maximum, argmax};
}

Five summaries_backward_cuda(const Attention& a, In lse, In argmax, Opt grad_column_sum, Opt grad_entropy,
                             Opt grad_maximum, std::array<bool, 5> needed) {
  const Call call(a.query);
  const Loaded loaded(call, a, /*on_tensor_cores=*/false);
  const at::ScalarType type = lse.scalar_type();
  const Numbers column_sum(call, grad_column_sum, type), entropy(call, grad_entropy, type),
      maximum(call, grad_maximum, type), places(call, argmax, at::kLong);
  const WeightGradient source{
      {}, 1, column_sum.data(), entropy.data(), maximum.data(), static_cast<const Index*>(places.data())};
  return gradients_through(call, loaded, a, lse, needed, source);
}

}  // namespace attention_ops
