// rope: the public operator for rotary positions, and the schema of its primitive.
#include <ATen/ops/arange.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/allocate.h"
#include "ops/check.h"
#include "ops/ops.h"

namespace attention_ops {
namespace {

constexpr const char* kOp = "rope";

void check_x(const Tensor& x) {
  TORCH_CHECK_TYPE(is_attention_type(x.scalar_type()), kOp,
                   ": expected x dtype float64, float32, bfloat16 or float16, got ", type_name(x.scalar_type()));
  TORCH_CHECK_TYPE(x.layout() == at::kStrided, kOp, ": expected x layout Strided, got ", x.layout());
  TORCH_CHECK_VALUE(x.dim() >= 2, kOp, ": expected x with 2 or more dimensions [..., H, L, D], got ", x.dim());
  check_length(kOp, "x", x.sym_size(-2));
}

void check_of_x(std::string_view name, const Tensor& given, const Tensor& x) {
  TORCH_CHECK_TYPE(given.layout() == at::kStrided, kOp, ": expected ", name, " layout Strided, got ", given.layout());
  TORCH_CHECK_VALUE(given.device() == x.device(), kOp, ": expected ", name, " device ", x.device(), " as in x, got ",
                    given.device());
}

void check_frequencies(const Tensor& inv_freq, at::IntArrayRef axes, double factor, const Tensor& x) {
  TORCH_CHECK_TYPE(inv_freq.scalar_type() == at::kDouble, kOp, ": expected inv_freq dtype float64, got ",
                   type_name(inv_freq.scalar_type()));
  check_of_x("inv_freq", inv_freq, x);
  TORCH_CHECK_VALUE(inv_freq.dim() == 1, kOp, ": expected inv_freq with 1 dimension, got ", inv_freq.dim());
  const auto pairs = inv_freq.sym_size(0), width = x.sym_size(-1);
  TORCH_CHECK_VALUE(holds((pairs * 2).sym_le(width)), kOp, ": expected x width of ", pairs * 2, " or more for the ",
                    pairs, " pairs of inv_freq, got ", width);
  const auto count = static_cast<int64_t>(axes.size());
  TORCH_CHECK_VALUE(axes.empty() || same(pairs, count), kOp, ": expected axes length ", pairs, " as in inv_freq, got ",
                    count);
  const auto negative = std::find_if(axes.begin(), axes.end(), [](int64_t axis) { return axis < 0; });
  TORCH_CHECK_VALUE(negative == axes.end(), kOp, ": expected axes of 0 or more, got ", *negative);
  TORCH_CHECK_VALUE(std::isfinite(factor), kOp, ": expected factor finite, got ", factor);
}

// What lies before the heads.
std::vector<c10::SymInt> leading_of(const Tensor& x) {
  const auto sizes = x.sym_sizes();
  return x.dim() <= 3 ? std::vector<c10::SymInt>{} : sizes.slice(0, x.dim() - 3).vec();
}

// Bfloat16 would turn 257 into 256.
void check_positions_type(const Tensor& positions) {
  const auto type = positions.scalar_type();
  const bool fits = at::isIntegralType(type, /*includeBool=*/false) || type == at::kFloat || type == at::kDouble;
  TORCH_CHECK_TYPE(fits, kOp, ": expected positions dtype of integers, float32 or float64, got ", type_name(type));
}

void check_positions_sizes(const Tensor& positions, at::IntArrayRef axes, const std::vector<c10::SymInt>& leading,
                           const Tensor& x) {
  const int64_t own = axes.empty() ? 1 : 2, count = static_cast<int64_t>(leading.size());
  const char* shape = axes.empty() ? "[L] or [B, L]" : "[axes, L] or [B, axes, L]";
  TORCH_CHECK_VALUE(positions.dim() >= own && positions.dim() <= own + count, kOp, ": expected positions with ", own,
                    " to ", own + count, " dimensions, ", shape, " beside x with ", x.dim(), ", got ", positions.dim());
  TORCH_CHECK_VALUE(same(positions.sym_size(-1), x.sym_size(-2)), kOp, ": expected positions length ", x.sym_size(-2),
                    " as in x, got ", positions.sym_size(-1));
  const int64_t batch = positions.dim() - own;
  for (int64_t d = 0; d < batch; ++d) {
    const auto& wanted = leading[count - batch + d];
    TORCH_CHECK_VALUE(broadcasts(positions.sym_size(d), wanted), kOp, ": expected positions size ", wanted,
                      " or 1 at dimension ", d, " as in x, got ", positions.sym_size(d));
  }
  if (axes.empty()) return;
  const int64_t last = *std::max_element(axes.begin(), axes.end());
  TORCH_CHECK_VALUE(holds(positions.sym_size(-2).sym_gt(last)), kOp, ": expected positions with ", last + 1,
                    " or more axes as in axes, got ", positions.sym_size(-2));
}

// [B|1, axes, L] float64
Tensor positions_of(Opt given, const c10::SymInt& offset, at::IntArrayRef axes, const Tensor& x) {
  if (!given) {
    TORCH_CHECK_VALUE(axes.empty(), kOp, ": expected positions [axes, L] with axes, got None");
    const auto options = x.options().dtype(at::kDouble);
    return at::arange(offset, offset + x.sym_size(-2), options).unsqueeze(0).unsqueeze(0);
  }
  check_positions_type(*given);
  check_of_x("positions", *given, x);
  const auto leading = leading_of(x);
  check_positions_sizes(*given, axes, leading, x);
  Tensor positions = given->scalar_type() == at::kDouble ? *given : given->to(at::kDouble);
  if (!surely(offset.sym_eq(0))) positions = positions.add(at::Scalar(offset));
  if (axes.empty()) positions = positions.unsqueeze(-2);
  if (positions.dim() == 2) return positions.unsqueeze(0);
  if (leading.size() == 1) return positions;
  std::vector<c10::SymInt> sizes = leading;
  sizes.push_back(positions.sym_size(-2)), sizes.push_back(positions.sym_size(-1));
  return positions.expand_symint(sizes).flatten(0, -3);
}

Tensor table_of(In x, In inv_freq, Opt positions, c10::SymInt offset, at::IntArrayRef axes, double factor) {
  check_x(x);
  check_frequencies(inv_freq, axes, factor, x);
  return rope_table().call(positions_of(positions, offset, axes, x), inv_freq, axes, factor, lse_type(x));
}

Tensor rope_of(In x, In inv_freq, Opt positions, c10::SymInt offset, at::IntArrayRef axes, bool interleaved,
               double factor) {
  const Tensor table = table_of(x, inv_freq, positions, offset, axes, factor);
  Tensor rows = x.dim() > 4 ? x.flatten(0, -4) : x;  // [B, H, L, D]
  while (rows.dim() < 4) rows = rows.unsqueeze(0);
  const Tensor out = rope().call(rows, table, interleaved, /*inverse=*/false);
  return x.dim() == 4 ? out : out.view_symint(x.sym_sizes());
}

TORCH_LIBRARY_FRAGMENT(attention_ops, m) {
  m.def(
      "rope(Tensor x, Tensor inv_freq, Tensor? positions=None, SymInt offset=0, int[] axes=[], "
      "bool interleaved=False, float factor=1.) -> Tensor");
  m.def(
      "rope_table(Tensor x, Tensor inv_freq, Tensor? positions=None, SymInt offset=0, int[] axes=[], float factor=1.) "
      "-> Tensor");
  const auto define = [&](const char* schema) { m.def(torch::schema(schema), {at::Tag::pt2_compliant_tag}); };
  define("_rope_table(Tensor positions, Tensor inv_freq, int[] axes, float factor, ScalarType dtype) -> Tensor");
  define("_rope(Tensor x, Tensor table, bool interleaved, bool inverse) -> Tensor");
}

TORCH_LIBRARY_IMPL(attention_ops, CompositeImplicitAutograd, m) {
  m.impl("rope_table", table_of);
  m.impl("rope", rope_of);
}
TORCH_LIBRARY_IMPL(attention_ops, FuncTorchBatchedDecomposition, m) {
  m.impl("rope_table", table_of);
  m.impl("rope", rope_of);
}
TORCH_LIBRARY_IMPL(attention_ops, Batched, m) {
  m.impl("rope_table", table_of);
  m.impl("rope", rope_of);
}

}  // namespace
}  // namespace attention_ops
