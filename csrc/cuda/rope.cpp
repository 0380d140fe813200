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

Tensor rope_cuda(In x, In positions, In inv_freq, at::IntArrayRef axes, bool interleaved, bool inverse, double factor) {
  const Call call(x);
  const Tensor out = empty_heads_like(x);
  const Index pairs = inv_freq.size(0), position_batch = positions.size(0);
  const auto sums = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const Tensor table = scratch(x, {position_batch, x.size(2), 2, pairs}, sums);
  const Numbers places(call, positions, at::kDouble), frequencies(call, inv_freq, at::kDouble);
  const RopeProblem problem{read_view(call.reads(x)),
                            result(call, out),
                            pairs,
                            position_batch,
                            positions.size(1),
                            static_cast<const double*>(places.data()),
                            static_cast<const double*>(frequencies.data()),
                            pointer(call, table),
                            interleaved,
                            inverse,
                            factor};
  for (Index first = 0; first < pairs; first += RopeAxes::kMost)
    simt_rope_table(problem, axes_from(first, pairs, axes), call.stream());
  simt_rope(problem, call.stream());
  return out;
}

}  // namespace attention_ops
