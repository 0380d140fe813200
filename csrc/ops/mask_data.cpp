// Masks, biases and other tensors beside query, key and value: which shape each has, and how it broadcasts.
#include <ATen/ops/expand.h>

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "kernels/mask/parse.h"
#include "ops/check.h"
#include "ops/inputs.h"

namespace attention_ops {
namespace {

MaskSpec parsed(const char* op, std::string_view mask) {
  try {
    return parse_mask(mask);
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, op, ": ", error.what());
  }
}

Tensor checked_type(const char* op, const std::string& name, const Tensor& x, bool is_integer) {
  const auto type = x.scalar_type();
  const bool fits = is_integer ? at::isIntegralType(type, /*includeBool=*/false) : type == at::kBool;
  TORCH_CHECK_TYPE(fits, op, ": expected ", name, " dtype ", is_integer ? "int64" : "bool", ", got ", type_name(type));
  return type == at::kBool || type == at::kLong ? x : x.to(at::kLong);
}

std::string_view axis_name(char axis) {
  switch (axis) {
    case 'B':
      return "B";
    case 'H':
      return "H";
    case 'q':
      return "Lq";
    case 'k':
      return "Lk";
    case 'L':
      return "L";
    case 'd':
      return "Lq + Lk - 1";
    case 'D':
      return "D";
    case 'V':
      return "Dv";
    case 'r':
      return "row blocks";
    case 'c':
      return "column blocks";
  }
  return "?";
}

// With one of B and H left out, the other could be meant.
void check_no_guess(const char* op, const std::string& name, const Tensor& x, std::string_view axes) {
  if (!axes.starts_with("BH")) return;
  std::string rest;
  for (const char axis : axes.substr(2)) rest += (rest.empty() ? "" : ", ") + std::string(axis_name(axis));
  TORCH_CHECK_VALUE(x.dim() + 1 != static_cast<int64_t>(axes.size()), op, ": expected ", name, " with ", axes.size(),
                    " dimensions, [B, 1, ", rest, "] or [1, H, ", rest, "], got ", x.dim());
}

}  // namespace

void Inputs::take_mask(const Arguments& a) {
  if (a.mask.empty() && a.mask_data.empty()) return;
  const MaskSpec spec = parsed(op, a.mask);
  size_t wanted = 0;
  for (const MaskLeaf& leaf : spec.leaves) wanted += kind_info(leaf.kind).data.size();
  TORCH_CHECK_VALUE(a.mask_data.size() == wanted, op, ": expected mask_data with ", wanted, " tensors as mask '",
                    a.mask, "' takes, got ", a.mask_data.size());
  mask_data.reserve(wanted);
  for (const MaskLeaf& leaf : spec.leaves) {
    const KindInfo& kind = kind_info(leaf.kind);
    for (const DataInfo& info : kind.data) {
      const std::string name = std::string(kind.name) + (info.name == "mask" ? " " : " mask ") + std::string(info.name);
      const Tensor& x = a.mask_data[mask_data.size()];
      check_device(op, name, x, query);
      const Tensor typed = checked_type(op, name, x, info.is_integer);
      mask_data.push_back(align(typed, name, info.axes, leaf.arguments.empty() ? 0 : leaf.arguments[0]));
    }
  }
}

c10::SymInt Inputs::size_of(char axis, int64_t block) const {
  block = std::min<int64_t>(block, std::numeric_limits<int32_t>::max());  // as kernels do: no length reaches it
  switch (axis) {
    case 'B':
      return B;
    case 'H':
      return H;
    case 'q':
      return Lq;
    case 'r':
      return (Lq + (block - 1)) / block;
    case 'c':
      return (Lk + (block - 1)) / block;
    case 'd':  // none where there are no pairs
      return surely(Lq.sym_eq(0)) || surely(Lk.sym_eq(0)) ? c10::SymInt(0) : Lq + Lk - 1;
    case 'D':
      return query.sym_size(3);
    case 'V':
      return value.sym_size(3);
    default:
      return Lk;  // k, and L, where both are the same
  }
}

// [leading|1..., axes] -> [B|1, axes], where a tensor may leave leading dimensions out.
Tensor Inputs::fold_leading(Tensor x, const std::string& name, size_t axes) const {
  const size_t count = leading.size(), dims = count + axes - 1;
  while (x.dim() < static_cast<int64_t>(dims)) x = x.unsqueeze(0);
  std::vector<c10::SymInt> sizes = x.sym_sizes().vec();
  bool is_shared = true;
  for (size_t d = 0; d < count; ++d) {
    TORCH_CHECK_VALUE(broadcasts(sizes[d], leading[d]), op, ": expected ", name, " size ", leading[d],
                      " or 1 at dimension ", d, " as in query, got ", sizes[d]);
    is_shared &= surely(sizes[d].sym_eq(1));
    sizes[d] = leading[d];
  }
  return (is_shared ? x : x.expand_symint(sizes)).flatten(0, static_cast<int64_t>(count) - 1);
}

// Brings a tensor to one dimension per axis, each of the size wanted or, where the axis broadcasts, 1.
Tensor Inputs::align(const Tensor& x, const std::string& name, std::string_view axes, int64_t block) const {
  const auto dims = static_cast<int64_t>(axes.size() + leading.size() - 1);
  TORCH_CHECK_VALUE(x.dim() <= dims, op, ": expected ", name, " with at most ", dims, " dimensions, got ", x.dim());
  if (rank != 3) check_no_guess(op, name, x, axes);
  Tensor aligned = x;
  if (leading.size() > 1) aligned = fold_leading(x, name, axes.size());
  while (aligned.dim() < static_cast<int64_t>(axes.size())) aligned = aligned.unsqueeze(0);
  for (size_t d = 0; d < axes.size(); ++d) {
    const char axis = axes[d];
    if (axis == 'L')
      TORCH_CHECK_VALUE(same(Lq, Lk), op, ": expected key length ", Lq, " as in query for ", name, ", got ", Lk);
    const c10::SymInt wanted = size_of(axis, block), actual = aligned.sym_size(d);
    const bool may_be_one = axis == 'B' || axis == 'H' || axes == "BHqk";
    TORCH_CHECK_VALUE(may_be_one ? broadcasts(actual, wanted) : same(actual, wanted), op, ": expected ", name, " size ",
                      wanted, may_be_one ? " or 1" : "", " at ", axis_name(axis), ", got ", actual);
  }
  return aligned;
}

}  // namespace attention_ops
