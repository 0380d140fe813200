// Rotary positions on the CPU.
#include "kernels/cpu/rope.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "cpu/parallel.h"
#include "ops/allocate.h"
#include "ops/views.h"

namespace attention_ops {
namespace {

template <class E>
RopeView<E> rope_view(const Tensor& x, E* data) {
  return {data, {x.stride(0), x.stride(1), x.stride(2), x.stride(3)}};
}

Tensor rope_cpu(In x, In positions, In inv_freq, at::IntArrayRef axes, bool interleaved, bool inverse, double factor) {
  const Tensor out = empty_heads_like(x);
  const Vector<double> places(positions), frequencies(inv_freq);
  const RopeProblem problem{
      x.size(0),         x.size(1),         x.size(2),     x.size(3),          inv_freq.size(0),
      positions.size(0), positions.size(1), places.data(), frequencies.data(), axes.empty() ? nullptr : axes.data(),
      interleaved,       inverse,           factor};
  in_element_type(x, [&]<class E>() {
    const Rope<E> kernel(problem, rope_view(x, static_cast<const E*>(x.const_data_ptr())),
                         rope_view(out, static_cast<E*>(out.mutable_data_ptr())));
    const Tensor scratch = empty_of<Wide<E>>(x, {kernel.table_size()});
    auto* tables = scratch.mutable_data_ptr<Wide<E>>();
    run_tasks(kernel.table_tasks(), kernel.table_operations(), 0,
              [&](Index task, Arena&) { kernel.make_table(tables, task); });
    run_tasks(kernel.tasks(), kernel.operations(), 0, [&](Index task, Arena&) { kernel.run(tables, task); });
  });
  return out;
}

TORCH_LIBRARY_IMPL(attention_ops, CPU, m) {
  m.impl("_rope", rope_cpu);
}

}  // namespace
}  // namespace attention_ops
