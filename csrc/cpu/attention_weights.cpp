// Weights and their summaries on the CPU, with their gradients.
#include <torch/library.h>

#include "cpu/backward.h"
#include "kernels/cpu/attention_softmax.h"
#include "kernels/cpu/attention_weights.h"

namespace attention_ops {
namespace {

// What `kernel_of(out)` writes, at a cost of so many products of all queries and keys.
template <class T, class E, class F>
Tensor run_rows(const Loaded<T, E, E>& loaded, const Attention& a, bool average, double cost, F&& kernel_of) {
  const Problem<T, E>& p = loaded.problem;
  const Tensor out = on_large_pages(at::empty({p.batch, average ? 1 : p.heads, p.queries, p.keys}, a.query.options()));
  const auto kernel = kernel_of(result_view4(out));
  run_tasks(kernel.tasks(), cost * p.pair_operations(), kernel.scratch_bytes(),
            [&](Index task, Arena& arena) { kernel.run(task, arena); });
  return average ? out.squeeze(1) : out;
}

// The weights, or their tangents in a direction.
template <class T>
Tensor weights_of(const Loaded<T>& loaded, const Attention& a, In lse, bool average,
                  const Tangents<T>* along = nullptr) {
  const Vector<T> lse_rows(lse);
  return run_rows<T, T>(loaded, a, average, along ? 3 : 1, [&](const Tensor4& out) {
    return AttentionWeights<T>(loaded.problem, lse_rows.data(), out, average, along);
  });
}

Tensor weights_cpu(const Attention& a, Opt lse, Opt heads, Opt rows, c10::SymInt queries, bool average) {
  if (lse)
    return in_compute_type(a.query, [&]<class T>() -> Tensor {
      Loaded<T> loaded(a);
      loaded.place(heads, rows, queries.expect_int());
      return weights_of(loaded, a, *lse, average);
    });
  return in_row_types(a, queries.expect_int(), [&]<class T, class E>() -> Tensor {
    Loaded<T, E, E> loaded(a);
    loaded.place(heads, rows, queries.expect_int());
    return run_rows<T, E>(loaded, a, average, 1,
                          [&](const Tensor4& out) { return AttentionSoftmax<T, E>(loaded.problem, out, average); });
  });
}

Tensor weights_jvp_cpu(const Attention& a, In lse, Opt heads, Opt rows, c10::SymInt queries, bool average, Opt query_t,
                       Opt key_t, Opt bias_t, Opt distance_t, Opt lse_t) {
  return in_compute_type(a.query, [&]<class T>() -> Tensor {
    Loaded<T> loaded(a);
    loaded.place(heads, rows, queries.expect_int());
    const LoadedTangents<T> along(query_t, key_t, {}, bias_t, distance_t, {}, lse_t);
    return weights_of(loaded, a, lse, average, &along.view);
  });
}

// The shared half of all gradients, and of their tangents: what is asked for, the pass, the types.
template <class T>
Five gradients_through(const Loaded<T>& loaded, const Attention& a, In lse, std::array<bool, 5> needed,
                       const typename AttentionBackward<T>::Source& source, const Tangents<T>* along = nullptr) {
  Gradients<T> grads;
  if (needed[0]) grads.query = empty_rows<T>(a.query, a.query.sizes());
  if (needed[1]) grads.key = empty_rows<T>(a.key, a.key.sizes());
  if (needed[2] && a.bias) grads.bias = on_large_pages(at::empty(a.bias->sizes(), a.bias->options()));
  if (needed[3] && a.distance) grads.distance = empty_of<T>(a.query, a.distance->sizes());
  if (needed[4]) grads.lse = empty_of<T>(a.query, lse.sizes());
  const Vector<T> lse_rows(lse);
  BackwardTangent<T> direction;
  if (along) direction.of = *along;
  run_backward<T, T>(loaded.problem, {{}, {}, lse_rows.data(), nullptr}, grads, source, along ? &direction : nullptr);
  return {finished(grads.query, a.query), finished(grads.key, a.key), finished(grads.bias, a.bias.value_or(a.query)),
          finished(grads.distance, a.distance.value_or(a.query)), finished(grads.lse, lse)};
}

Tensor4 view_of_heads(In x, bool average) {
  return read_view(average ? x.unsqueeze(1) : x);
}
template <class T>
T head_factor(const Attention& a, bool average) {
  return average ? T(1) / T(std::max<Index>(a.query.size(1), 1)) : T(1);
}

Five weights_backward_cpu(const Attention& a, In lse, Opt heads, Opt rows, c10::SymInt queries, bool average,
                          In grad_weights, std::array<bool, 5> needed) {
  return in_compute_type(a.query, [&]<class T>() -> Five {
    Loaded<T> loaded(a);
    loaded.place(heads, rows, queries.expect_int());
    const DenseGradient<T> source(view_of_heads(grad_weights, average), head_factor<T>(a, average));
    return gradients_through<T>(loaded, a, lse, needed, source);
  });
}

Five weights_double_backward_cpu(const Attention& a, In lse, Opt heads, Opt rows, c10::SymInt queries, bool average,
                                 In grad_weights, Opt query_t, Opt key_t, Opt bias_t, Opt distance_t, Opt lse_t,
                                 Opt grad_weights_t, std::array<bool, 5> needed) {
  return in_compute_type(a.query, [&]<class T>() -> Five {
    Loaded<T> loaded(a);
    loaded.place(heads, rows, queries.expect_int());
    const LoadedTangents<T> along(query_t, key_t, {}, bias_t, distance_t, {}, lse_t);
    const DenseGradient<T> source(view_of_heads(grad_weights, average), head_factor<T>(a, average),
                                  grad_weights_t ? view_of_heads(*grad_weights_t, average) : Tensor4{});
    return gradients_through<T>(loaded, a, lse, needed, source, &along.view);
  });
}

// The summaries, or their tangents in a direction.
template <class T>
Three summaries_of(const Loaded<T>& loaded, In lse, int64_t* argmax, const Tangents<T>* along = nullptr) {
  const Problem<T>& p = loaded.problem;
  const Tensor column_sum = empty_of<T>(lse, {p.batch, p.heads, p.keys});
  const Tensor entropy = empty_of<T>(lse, lse.sizes()), maximum = empty_of<T>(lse, lse.sizes());
  const Vector<T> lse_rows(lse);
  const AttentionSummaries<T> kernel(
      p, lse_rows.data(),
      {column_sum.mutable_data_ptr<T>(), entropy.mutable_data_ptr<T>(), maximum.mutable_data_ptr<T>(), argmax}, along);
  run_tasks(kernel.tasks(), (along ? 3 : 1) * p.pair_operations(), kernel.scratch_bytes(),
            [&](Index task, Arena& arena) { kernel.run(task, arena); });
  run_tasks(kernel.finish_tasks(), p.row_operations(), 0, [&](Index task, Arena&) { kernel.finish(task); });
  return {column_sum, entropy, maximum};
}

Four summaries_cpu(const Attention& a, In lse) {
  return in_compute_type(a.query, [&]<class T>() -> Four {
    const Tensor argmax = at::empty(lse.sizes(), lse.options().dtype(at::kLong));
    const auto [column_sum, entropy, maximum] = summaries_of<T>(Loaded<T>(a), lse, argmax.mutable_data_ptr<int64_t>());
    return {column_sum, entropy, maximum, argmax};
  });
}

Three summaries_jvp_cpu(const Attention& a, In lse, In, Opt query_t, Opt key_t, Opt bias_t, Opt distance_t, Opt lse_t) {
  return in_compute_type(a.query, [&]<class T>() -> Three {
    const LoadedTangents<T> along(query_t, key_t, {}, bias_t, distance_t, {}, lse_t);
    return summaries_of<T>(Loaded<T>(a), lse, nullptr, &along.view);
  });
}

template <class T>
class LoadedSummaryGradients {
 public:
  LoadedSummaryGradients(Opt column_sum, Opt entropy, Opt maximum)
      : column_sum_(column_sum), entropy_(entropy), maximum_(maximum) {}
  SummaryGradients<T> view() const { return {column_sum_.data(), entropy_.data(), maximum_.data()}; }

 private:
  Vector<T> column_sum_, entropy_, maximum_;
};

Five summaries_backward_cpu(const Attention& a, In lse, In argmax, Opt grad_column_sum, Opt grad_entropy,
                            Opt grad_maximum, std::array<bool, 5> needed) {
  return in_compute_type(a.query, [&]<class T>() -> Five {
    const Loaded<T> loaded(a);
    const LoadedSummaryGradients<T> grads(grad_column_sum, grad_entropy, grad_maximum);
    const Vector<int64_t> places(argmax);
    const SummaryGradient<T> source(loaded.problem, places.data(), grads.view());
    return gradients_through<T>(loaded, a, lse, needed, source);
  });
}

Five summaries_double_backward_cpu(const Attention& a, In lse, In argmax, Opt grad_column_sum, Opt grad_entropy,
                                   Opt grad_maximum, Opt query_t, Opt key_t, Opt bias_t, Opt distance_t, Opt lse_t,
                                   Opt grad_column_sum_t, Opt grad_entropy_t, Opt grad_maximum_t,
                                   std::array<bool, 5> needed) {
  return in_compute_type(a.query, [&]<class T>() -> Five {
    const Loaded<T> loaded(a);
    const LoadedTangents<T> along(query_t, key_t, {}, bias_t, distance_t, {}, lse_t);
    const LoadedSummaryGradients<T> grads(grad_column_sum, grad_entropy, grad_maximum);
    const LoadedSummaryGradients<T> grads_t(grad_column_sum_t, grad_entropy_t, grad_maximum_t);
    const Vector<int64_t> places(argmax);
    const SummaryGradient<T> source(loaded.problem, places.data(), grads.view(), grads_t.view());
    return gradients_through<T>(loaded, a, lse, needed, source, &along.view);
  });
}

TORCH_LIBRARY_IMPL(attention_ops, CPU, m) {
  m.impl("_attention_weights", Flat<weights_cpu>::call);
  m.impl("_attention_weights_backward", Flat<weights_backward_cpu>::call);
  m.impl("_attention_summaries", Flat<summaries_cpu>::call);
  m.impl("_attention_summaries_backward", Flat<summaries_backward_cpu>::call);
  m.impl("_attention_weights_jvp", Flat<weights_jvp_cpu>::call);
  m.impl("_attention_weights_double_backward", Flat<weights_double_backward_cpu>::call);
  m.impl("_attention_summaries_jvp", Flat<summaries_jvp_cpu>::call);
  m.impl("_attention_summaries_double_backward", Flat<summaries_double_backward_cpu>::call);
}

}  // namespace
}  // namespace attention_ops
