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

// The rotation of rows by a table with a row for each; without one there is none.
struct Rotation {
  const Tensor* table = nullptr;
  bool interleaved = false, inverse = false;
};

template <class T>
class Turns {
 public:
  explicit Turns(const Rotation& by) {
    if (!by.table) return;
    table_ = in_type(*by.table, kScalarType<T>);
    const Index pairs = table_.size(3);
    if (table_.stride(3) != 1 || table_.stride(2) != pairs) table_ = table_.contiguous();
    view_ = {table_.const_data_ptr<T>(),
             table_.size(0) == 1 ? 0 : table_.stride(0),
             table_.stride(1),
             pairs,
             by.interleaved,
             by.inverse};
  }
  const RowTurn<T>& view() const { return view_; }

 private:
  Tensor table_;
  RowTurn<T> view_;
};

// `out` may be x.
inline void turn_rows(const Tensor& out, In x, const Rotation& by) {
  TORCH_INTERNAL_ASSERT(by.table->size(1) == x.size(2), "expected a table with a row for each of x");
  in_element_type(x, [&]<class E>() {
    const Turns<Wide<E>> turns(by);
    const Rope<E> kernel({x.size(0), x.size(1), x.size(2), x.size(3)}, turns.view(),
                         rope_view(x, static_cast<const E*>(x.const_data_ptr())),
                         rope_view(out, static_cast<E*>(out.mutable_data_ptr())));
    run_tasks(kernel.tasks(), kernel.operations(), 0, [&](Index task, Arena&) { kernel.run(task); });
  });
}

}  // namespace attention_ops
