// The backward pass on tensors, for every source of the weights' gradient.
#pragma once
#include <ATen/ops/zeros.h>

#include "cpu/launch.h"
#include "cpu/parallel.h"
#include "kernels/cpu/attention_backward.h"

namespace attention_ops {

// Gradients of one call; undefined where nobody asked.
template <class T, class E = T>
struct Gradients {
  Tensor query, key, value, bias, sinks, lse;

  BackwardResult<T, E> view() const {
    BackwardResult<T, E> r{result_view<E>(query), result_view<E>(key), result_view<E>(value), result_view4(bias)};
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

template <class T, class E>
void run_backward(const Problem<T, E>& problem, const BackwardInput<T, E>& input, Gradients<T, E>& gradients,
                  const typename AttentionBackward<T, E>::Source& source, const BackwardTangent<T>* along = nullptr) {
  if (problem.batch * problem.heads * problem.queries == 0) return gradients.clear();
  const AttentionBackward<T, E> kernel(problem, input, gradients.view(), source, along);
  run_tasks(kernel.pack_tasks(), problem.row_operations(), 0, [&](Index task, Arena&) { kernel.pack(task); });
  const double operations = (along ? 6 : 2.5) * problem.pair_operations();
  if (kernel.is_local()) {
    run_tasks(kernel.tasks(), operations, std::max(kernel.prepare_bytes(), kernel.scratch_bytes()),
              [&](Index task, Arena& arena) { kernel.run_owner(task, arena); });
    return kernel.finish_shared();
  }
  run_tasks(kernel.prepare_tasks(), problem.row_operations(), kernel.prepare_bytes(),
            [&](Index task, Arena& arena) { kernel.prepare(task, arena); });
  run_tasks(kernel.tasks(), operations, kernel.scratch_bytes(),
            [&](Index task, Arena& arena) { kernel.run(task, arena); });
  run_tasks(kernel.finish_tasks(), problem.row_operations(), 0, [&](Index task, Arena&) { kernel.finish(task); });
}

// In its own tensor's type; a gradient that was not asked for is empty.
inline Tensor finished(const Tensor& x, const Tensor& like) {
  return x.defined() ? in_type(x, like.scalar_type()) : nothing(like);
}

}  // namespace attention_ops
