// Rotary positions on CUDA.
#include "cuda/operators.h"
#include "cuda/scratch.h"

namespace attention_ops {
namespace {

RopeAxes axes_from(Index first, Index pairs, at::IntArrayRef axes) {
  RopeAxes some{first, int(std::min<Index>(pairs - first, RopeAxes::kMost)), {}};
  for (int k = 0; k < some.count && !axes.empty(); ++k) some.axis[k] = static_cast<int32_t>(axes[first + k]);
  return some;
}

}  // namespace

Tensor rope_table_cuda(In positions, In inv_freq, at::IntArrayRef axes, double factor, at::ScalarType dtype) {
  const Call call(inv_freq);
  const Index batch = positions.size(0), length = positions.size(2), pairs = inv_freq.size(0);
  const Tensor table = at::empty({batch, length, 2, pairs}, inv_freq.options().dtype(dtype));
  const Numbers places(call, positions, at::kDouble), frequencies(call, inv_freq, at::kDouble);
  const RopeTableProblem problem{batch,
                                 positions.size(1),
                                 length,
                                 pairs,
                                 static_cast<const double*>(places.data()),
                                 static_cast<const double*>(frequencies.data()),
                                 factor,
                                 pointer(call, table),
                                 dtype == at::kDouble};
  for (Index first = 0; first < pairs; first += RopeAxes::kMost)
    simt_rope_table(problem, axes_from(first, pairs, axes), call.stream());
  return table;
}

Tensor rope_cuda(In x, In table, bool interleaved, bool inverse) {
  const Call call(x);
  const Tensor out = empty_turned_like(x, inverse);
  const Tensor turns = table.to(lse_type(x)).contiguous();
  simt_rope({read_view(call.reads(x)), result(call, out), turns.size(3), turns.size(0),
             call.reads(turns).const_data_ptr(), interleaved, inverse},
            call.stream());
  return out;
}

}  // namespace attention_ops
