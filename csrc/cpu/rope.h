// The rotation of rows, from tensors to tensors.
#pragma once
#include "cpu/launch.h"
#include "cpu/parallel.h"
#include "kernels/cpu/rope.h"

namespace attention_ops {

template <class E>
RopeView<E> rope_view(const Tensor& x, E* data) {
  return {data, {x.stride(0), x.stride(1), x.stride(2), x.stride(3)}};
}

// `out` may be x.
inline void turn_rows(const Tensor& out, In x, In table, bool interleaved, bool inverse) {
  const Index pairs = table.size(3);
  in_element_type(x, [&]<class E>() {
    using T = Wide<E>;
    Tensor turns = in_type(table, kScalarType<T>);
    if (turns.stride(3) != 1 || turns.stride(2) != pairs) turns = turns.contiguous();
    const RopeProblem problem{x.size(0),       x.size(1),   x.size(2),
                              x.size(3),       pairs,       turns.size(0) == 1 ? 0 : turns.stride(0),
                              turns.stride(1), interleaved, inverse};
    const Rope<E> kernel(problem, turns.const_data_ptr<T>(), rope_view(x, static_cast<const E*>(x.const_data_ptr())),
                         rope_view(out, static_cast<E*>(out.mutable_data_ptr())));
    run_tasks(kernel.tasks(), kernel.operations(), 0, [&](Index task, Arena&) { kernel.run(task); });
  });
}

}  // namespace attention_ops
