// Weights and their summaries on CUDA, with their gradients.
#include <ATen/ops/full.h>

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

// What a loss gives to the weights, with the tensors that it points into.
WeightGradient of_weights(const Call& call, const Problem& p, Opt grad, bool average) {
  WeightGradient source;
  if (grad) source.grad = read_view(call.reads(average ? grad->unsqueeze(1) : *grad));
  source.factor = average ? 1. / double(std::max<Index>(p.heads, 1)) : 1;
  return source;
}
class OfSummaries {
 public:
  OfSummaries(const Call& call, In lse, In argmax, Opt column_sum, Opt entropy, Opt maximum)
      : column_sum_(call, column_sum, lse.scalar_type()),
        entropy_(call, entropy, lse.scalar_type()),
        maximum_(call, maximum, lse.scalar_type()),
        argmax_(call, argmax, at::kLong) {}
  WeightGradient view() const {
    return {{}, 1, column_sum_.data(), entropy_.data(), maximum_.data(), static_cast<const Index*>(argmax_.data())};
  }

 private:
  Numbers column_sum_, entropy_, maximum_, argmax_;
};

// The weights, or their tangents in a direction.
template <class... Along>
Tensor weights_of(const Call& call, const Loaded& loaded, const Attention& a, In lse, bool average,
                  const Along&... along) {
  const Problem& p = loaded.problem;
  const Tensor out = scratch(a.query, {p.batch, average ? 1 : p.heads, p.queries, p.keys}, a.query.scalar_type());
  const LoadedNorm norm(call, loaded, lse);
  simt_weights(p, norm.in, along..., result(call, out), average, call.stream());
  return average ? out.squeeze(1) : out;
}

// The summaries, or their tangents in a direction.
template <class... Along>
Three summaries_of(const Call& call, const Loaded& loaded, In lse, Index* argmax, const Along&... along) {
  const Problem& p = loaded.problem;
  const LoadedNorm norm(call, loaded, lse);
  const Tensor column_sum = scratch(lse, {p.batch, p.heads, p.keys}, norm.type);
  const Tensor entropy = scratch(lse, lse.sizes(), norm.type), maximum = scratch(lse, lse.sizes(), norm.type);
  const Summaries to{pointer(call, column_sum), pointer(call, entropy), pointer(call, maximum), argmax};
  simt_summaries(p, norm.in, along..., to, call.stream());
  return {column_sum, entropy, maximum};
}

// The shared half of all gradients, and of their tangents: what is asked for, and the passes.
template <class Source>
Five gradients_through(const Call& call, const Loaded& loaded, const Attention& a, In lse, std::array<bool, 5> needed,
                       const Source& source) {
  const Problem& p = loaded.problem;
  const LoadedNorm norm(call, loaded, lse);
  const Tensor query = needed[0] ? empty_heads_like(a.query) : Tensor();
  const Tensor key = needed[1] ? empty_heads_like(a.key) : Tensor();
  const Tensor bias = needed[2] && a.bias ? empty_like_shape(*a.bias) : Tensor();
  const Tensor distance = needed[3] && a.distance ? empty_like_shape(*a.distance) : Tensor();
  const Tensor grad_lse = needed[4] ? empty_like_shape(lse) : Tensor();
  BackwardResult to{result(call, query), result(call, key), {}, {}};
  to.grad_lse = pointer(call, grad_lse);
  simt_backward(p, norm.in, source, to, call.stream());
  bias_gradients(call, p, norm.in, bias, distance, norm.type, source);
  const auto finished = [](const Tensor& x, const Tensor& like) { return x.defined() ? x : nothing(like); };
  return {finished(query, a.query), finished(key, a.key), finished(bias, a.bias.value_or(a.query)),
          finished(distance, a.distance.value_or(a.query)), finished(grad_lse, lse)};
}

}  // namespace

Tensor weights_cuda(const Attention& a, Opt lse, Opt heads, Opt rows, c10::SymInt queries, bool average) {
  const Call call(a.query);
  Loaded loaded(call, a, /*on_tensor_cores=*/false);
  loaded.place(call, a, heads, rows, queries.expect_int());
  // The norm of rows whose lse is as large as this is counted from their scores.
  const auto unknown = [&] {
    return at::full(a.query.sizes().slice(0, 3), 1e30, a.query.options().dtype(lse_type(a.query)));
  };
  return weights_of(call, loaded, a, lse ? *lse : unknown(), average);
}

Tensor weights_jvp_cuda(const Attention& a, In lse, Opt heads, Opt rows, c10::SymInt queries, bool average, Opt query_t,
                        Opt key_t, Opt bias_t, Opt distance_t, Opt lse_t) {
  const Call call(a.query);
  Loaded loaded(call, a, /*on_tensor_cores=*/false);
  loaded.place(call, a, heads, rows, queries.expect_int());
  const LoadedTangents along(call, lse, query_t, key_t, {}, bias_t, distance_t, {}, lse_t);
  return weights_of(call, loaded, a, lse, average, along.view);
}

Five weights_backward_cuda(const Attention& a, In lse, Opt heads, Opt rows, c10::SymInt queries, bool average,
                           In grad_weights, std::array<bool, 5> needed) {
  const Call call(a.query);
  Loaded loaded(call, a, /*on_tensor_cores=*/false);
  loaded.place(call, a, heads, rows, queries.expect_int());
  return gradients_through(call, loaded, a, lse, needed, of_weights(call, loaded.problem, grad_weights, average));
}

Five weights_double_backward_cuda(const Attention& a, In lse, Opt heads, Opt rows, c10::SymInt queries, bool average,
                                  In grad_weights, Opt query_t, Opt key_t, Opt bias_t, Opt distance_t, Opt lse_t,
                                  Opt grad_weights_t, std::array<bool, 5> needed) {
  const Call call(a.query);
  Loaded loaded(call, a, /*on_tensor_cores=*/false);
  loaded.place(call, a, heads, rows, queries.expect_int());
  const LoadedTangents along(call, lse, query_t, key_t, {}, bias_t, distance_t, {}, lse_t);
  const WeightGradientTangent source{of_weights(call, loaded.problem, grad_weights, average),
                                     of_weights(call, loaded.problem, grad_weights_t, average), along.view};
  return gradients_through(call, loaded, a, lse, needed, source);
}

Four summaries_cuda(const Attention& a, In lse) {
  const Call call(a.query);
  const Loaded loaded(call, a, /*on_tensor_cores=*/false);
  const Tensor argmax = scratch(lse, lse.sizes(), at::kLong);
  const auto [column_sum, entropy, maximum] =
      summaries_of(call, loaded, lse, static_cast<Index*>(pointer(call, argmax)));
  return {column_sum, entropy, maximum, argmax};
}

Three summaries_jvp_cuda(const Attention& a, In lse, In argmax, Opt query_t, Opt key_t, Opt bias_t, Opt distance_t,
                         Opt lse_t) {
  const Call call(a.query);
  const Loaded loaded(call, a, /*on_tensor_cores=*/false);
  const LoadedTangents along(call, lse, query_t, key_t, {}, bias_t, distance_t, {}, lse_t);
  const Numbers places(call, argmax, at::kLong);
  return summaries_of(call, loaded, lse, static_cast<Index*>(const_cast<void*>(places.data())), along.view);
}

Five summaries_backward_cuda(const Attention& a, In lse, In argmax, Opt grad_column_sum, Opt grad_entropy,
                             Opt grad_maximum, std::array<bool, 5> needed) {
  const Call call(a.query);
  const Loaded loaded(call, a, /*on_tensor_cores=*/false);
  const OfSummaries source(call, lse, argmax, grad_column_sum, grad_entropy, grad_maximum);
  return gradients_through(call, loaded, a, lse, needed, source.view());
}

Five summaries_double_backward_cuda(const Attention& a, In lse, In argmax, Opt grad_column_sum, Opt grad_entropy,
                                    Opt grad_maximum, Opt query_t, Opt key_t, Opt bias_t, Opt distance_t, Opt lse_t,
                                    Opt grad_column_sum_t, Opt grad_entropy_t, Opt grad_maximum_t,
                                    std::array<bool, 5> needed) {
  const Call call(a.query);
  const Loaded loaded(call, a, /*on_tensor_cores=*/false);
  const LoadedTangents along(call, lse, query_t, key_t, {}, bias_t, distance_t, {}, lse_t);
  const OfSummaries source(call, lse, argmax, grad_column_sum, grad_entropy, grad_maximum);
  const OfSummaries moved(call, lse, argmax, grad_column_sum_t, grad_entropy_t, grad_maximum_t);
  return gradients_through(call, loaded, a, lse, needed,
                           WeightGradientTangent{source.view(), moved.view(), along.view});
}

}  // namespace attention_ops
