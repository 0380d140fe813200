// Rotary positions on the CPU.
#include "cpu/rope.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace attention_ops {
namespace {

Tensor rope_table_cpu(In positions, In inv_freq, at::IntArrayRef axes, double factor, at::ScalarType dtype) {
  const Index batch = positions.size(0), length = positions.size(2), pairs = inv_freq.size(0);
  const Tensor table = at::empty({batch, length, 2, pairs}, inv_freq.options().dtype(dtype));
  const Vector<double> places(positions), frequencies(inv_freq);
  const RopeTableProblem problem{
      batch, positions.size(1), length, pairs, places.data(), frequencies.data(), axes.empty() ? nullptr : axes.data(),
      factor};
  in_compute_type(table, [&]<class T>() {
    const RopeTable<T> kernel(problem, table.mutable_data_ptr<T>());
    run_tasks(kernel.tasks(), kernel.operations(), 0, [&](Index task, Arena&) { kernel.run(task); });
  });
  return table;
}

Tensor rope_cpu(In x, In table, bool interleaved, bool inverse) {
  const Tensor out = on_large_pages(empty_turned_like(x, inverse));
  turn_rows(out, x, {&table, interleaved, inverse});
  return out;
}

TORCH_LIBRARY_IMPL(attention_ops, CPU, m) {
  m.impl("_rope_table", rope_table_cpu);
  m.impl("_rope", rope_cpu);
}

}  // namespace
}  // namespace attention_ops
