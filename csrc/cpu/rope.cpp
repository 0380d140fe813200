// Rotary positions on the CPU.
#include "kernels/cpu/rope.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "cpu/launch.h"
#include "cpu/parallel.h"

namespace attention_ops {
namespace {

template <class E>
RopeView<E> rope_view(const Tensor& x, E* data) {
  return {data, {x.stride(0), x.stride(1), x.stride(2), x.stride(3)}};
}

Tensor rope_cpu(In x, In positions, In inv_freq, at::IntArrayRef axes, bool interleaved, bool inverse, double factor) {
  const Tensor out = on_large_pages(empty_heads_like(x));
  const Vector<double> places(positions), frequencies(inv_freq);
  RopeProblem problem{};
  problem.batch = x.size(0), problem.heads = x.size(1), problem.length = x.size(2), problem.width = x.size(3);
  problem.pairs = inv_freq.size(0), problem.inv_freq = frequencies.data();
  problem.position_batch = positions.size(0), problem.axes = positions.size(1), problem.positions = places.data();
  problem.axis_of = axes.empty() ? nullptr : axes.data();
  problem.interleaved = interleaved, problem.inverse = inverse, problem.factor = factor;
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
