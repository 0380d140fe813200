// The backward pass on tensors, for every source of the weights' gradient.
#pragma once
#include "cpu/launch.h"
#include "cpu/parallel.h"
#include "kernels/cpu/attention_backward.h"

namespace attention_ops {

// Gradients of one call; undefined where nobody asked.
template <class T, class E = T>
struct Gradients {
  Tensor query, key, value, bias, distance, sinks, lse;
  RowTurn<T> turn_query, turn_key;

  BackwardResult<T, E> view() const {
    BackwardResult<T, E> r;
    r.grad_query = result_view<E>(query), r.grad_key = result_view<E>(key), r.grad_value = result_view<E>(value);
    r.grad_bias = result_view4(bias);
    if (distance.defined()) r.grad_distance = {distance.mutable_data_ptr<T>(), distance.size(0), distance.size(1)};
    r.grad_sinks = sinks.defined() ? sinks.mutable_data_ptr<T>() : nullptr;
    r.negative_rows = lse.defined() ? lse.mutable_data_ptr<T>() : nullptr;
    r.turn_query = turn_query, r.turn_key = turn_key;
    return r;
  }
  bool any() const {
    const std::initializer_list<const Tensor*> all{&query, &key, &value, &bias, &distance, &sinks, &lse};
    return std::any_of(all.begin(), all.end(), [](const Tensor* x) { return x->defined(); });
  }
  // Nothing to visit: every gradient is zero.
  void clear() {
    for (Tensor* x : {&query, &key, &value, &bias, &distance, &sinks, &lse})
      if (x->defined()) x->zero_();
  }
};

template <class T, class E>
void run_backward(const Problem<T, E>& problem, const BackwardInput<T, E>& input, Gradients<T, E>& gradients,
                  const typename AttentionBackward<T, E>::Source& source, const BackwardTangent<T>* along = nullptr) {
  if (!gradients.any()) return;
  if (problem.batch * problem.heads * problem.queries == 0) return gradients.clear();
  const AttentionBackward<T, E> kernel(problem, input, gradients.view(), source, along);
  kernel.compute([](Index tasks, double operations, size_t scratch_bytes, auto&& f) {
    run_tasks(tasks, operations, scratch_bytes, f);
  });
}

// In its own tensor's type; a gradient that was not asked for is empty.
inline Tensor finished(const Tensor& x, const Tensor& like) {
  return x.defined() ? in_type(x, like.scalar_type()) : nothing(like);
}

}  // namespace attention_ops
