// The backward pass on tensors, for every source of the weights' gradient.
#pragma once
#include <ATen/ops/zeros.h>

#include "cpu/launch.h"
#include "cpu/parallel.h"
#include "kernels/cpu/attention_backward.h"

namespace attention_ops {

// Gradients of one call; undefined where nobody asked.
template <class T>
struct Gradients {
  Tensor query, key, value, bias, sinks, lse;

  BackwardResult<T> view() const {
    BackwardResult<T> r{result_view<T>(query), result_view<T>(key), result_view<T>(value), result_view4(bias)};
    r.grad_sinks = sinks.defined() ? sinks.mutable_data_ptr<T>() : nullptr;
    r.negative_rows = lse.defined() ? lse.mutable_data_ptr<T>() : nullptr;
    return r;
  }
  // Nothing to visit: every gradient is zero.
  void clear() {
    for (Tensor* x : {&query, &key, &value, &bias, &sinks, &lse})
      if (x->defined()) x->zero_();
  }
};

template <class T>
void run_backward(const Problem<T>& problem, const BackwardInput<T>& input, Gradients<T>& gradients,
                  const typename AttentionBackward<T>::Source& source) {
  if (problem.batch * problem.heads * problem.queries == 0) return gradients.clear();
  const AttentionBackward<T> kernel(problem, input, gradients.view(), source);
  run_tasks(kernel.prepare_tasks(), problem.row_operations(), kernel.prepare_bytes(),
            [&](Index task, Arena& arena) { kernel.prepare(task, arena); });
  run_tasks(kernel.tasks(), 2.5 * problem.pair_operations(), kernel.scratch_bytes(),
            [&](Index task, Arena& arena) { kernel.run(task, arena); });
  run_tasks(kernel.finish_tasks(), problem.row_operations(), 0, [&](Index task, Arena&) { kernel.finish(task); });
}

// In its own tensor's type; a gradient that was not asked for is empty.
inline Tensor finished(const Tensor& x, const Tensor& like) {
  return x.defined() ? in_type(x, like.scalar_type()) : nothing(like);
}

}  // namespace attention_ops
