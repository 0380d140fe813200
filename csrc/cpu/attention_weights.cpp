// Weights and their summaries on the CPU, with their gradients.
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "cpu/backward.h"
#include "kernels/cpu/attention_weights.h"

namespace attention_ops {
namespace {

Tensor weights_cpu(const Attention& a, In lse, Opt heads, Opt rows, c10::SymInt queries, bool average) {
  return in_compute_type(a.query, [&]<class T>() -> Tensor {
    Loaded<T> loaded(a);
    const Problem<T>& p = loaded.problem;
    loaded.place(heads, rows, queries.expect_int());
    const Tensor out = at::empty({p.batch, average ? 1 : p.heads, p.queries, p.keys}, a.query.options());
    const Vector<T> lse_rows(lse);
    const AttentionWeights<T> kernel(p, lse_rows.data(), result_view4(out), average);
    run_tasks(kernel.tasks(), p.pair_operations(), kernel.scratch_bytes(),
              [&](Index task, Arena& arena) { kernel.run(task, arena); });
    return average ? out.squeeze(1) : out;
  });
}

// The shared half of both gradients: what is asked for, the pass, the types.
template <class T>
Four gradients_through(const Loaded<T>& loaded, const Attention& a, In lse, std::array<bool, 4> needed,
                       const typename AttentionBackward<T>::Source& source) {
  Gradients<T> grads;
  if (needed[0]) grads.query = empty_rows<T>(a.query, a.query.sizes());
  if (needed[1]) grads.key = empty_rows<T>(a.key, a.key.sizes());
  if (needed[2] && a.bias) grads.bias = at::empty(a.bias->sizes(), a.bias->options());
  if (needed[3]) grads.lse = empty_of<T>(a.query, lse.sizes());
  const Vector<T> lse_rows(lse);
  run_backward<T, T>(loaded.problem, {{}, {}, lse_rows.data(), nullptr}, grads, source);
  return {finished(grads.query, a.query), finished(grads.key, a.key), finished(grads.bias, a.bias.value_or(a.query)),
          finished(grads.lse, lse)};
}

Four weights_backward_cpu(const Attention& a, In lse, Opt heads, Opt rows, c10::SymInt queries, bool average,
                          In grad_weights, std::array<bool, 4> needed) {
  return in_compute_type(a.query, [&]<class T>() -> Four {
    Loaded<T> loaded(a);
    loaded.place(heads, rows, queries.expect_int());
    const Tensor grad = average ? grad_weights.unsqueeze(1) : grad_weights;
    const T factor = average ? T(1) / T(std::max<Index>(loaded.problem.heads, 1)) : T(1);
    const DenseGradient<T> source(read_view(grad), factor);
    return gradients_through<T>(loaded, a, lse, needed, source);
  });
}

Four summaries_cpu(const Attention& a, In lse) {
  return in_compute_type(a.query, [&]<class T>() -> Four {
    const Loaded<T> loaded(a);
    const Problem<T>& p = loaded.problem;
    const Tensor column_sum = empty_of<T>(lse, {p.batch, p.heads, p.keys});
    const Tensor entropy = empty_of<T>(lse, lse.sizes()), maximum = empty_of<T>(lse, lse.sizes());
    const Tensor argmax = at::empty(lse.sizes(), lse.options().dtype(at::kLong));
    const Vector<T> lse_rows(lse);
    const AttentionSummaries<T> kernel(p, lse_rows.data(),
                                       {column_sum.mutable_data_ptr<T>(), entropy.mutable_data_ptr<T>(),
                                        maximum.mutable_data_ptr<T>(), argmax.mutable_data_ptr<int64_t>()});
    run_tasks(kernel.tasks(), p.pair_operations(), kernel.scratch_bytes(),
              [&](Index task, Arena& arena) { kernel.run(task, arena); });
    run_tasks(kernel.finish_tasks(), p.row_operations(), 0, [&](Index task, Arena&) { kernel.finish(task); });
    return {column_sum, entropy, maximum, argmax};
  });
}

Four summaries_backward_cpu(const Attention& a, In lse, In argmax, Opt grad_column_sum, Opt grad_entropy,
                            Opt grad_maximum, std::array<bool, 4> needed) {
  return in_compute_type(a.query, [&]<class T>() -> Four {
    const Loaded<T> loaded(a);
    const Vector<T> column_sum(grad_column_sum), entropy(grad_entropy), maximum(grad_maximum);
    const Vector<int64_t> places(argmax);
    const SummaryGradient<T> source(loaded.problem, places.data(), {column_sum.data(), entropy.data(), maximum.data()});
    return gradients_through<T>(loaded, a, lse, needed, source);
  });
}

TORCH_LIBRARY_IMPL(attention_ops, CPU, m) {
  m.impl("_attention_weights", Flat<weights_cpu>::call);
  m.impl("_attention_weights_backward", Flat<weights_backward_cpu>::call);
  m.impl("_attention_summaries", Flat<summaries_cpu>::call);
  m.impl("_attention_summaries_backward", Flat<summaries_backward_cpu>::call);
}

}  // namespace
}  // namespace attention_ops
