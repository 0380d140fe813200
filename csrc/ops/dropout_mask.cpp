// dropout_mask: which weights dropout keeps, as a tensor.
#include <torch/library.h>

#include "ops/check.h"
#include "ops/ops.h"

namespace attention_ops {
namespace {

Tensor dropout_mask(In seed, c10::SymInt batch, c10::SymInt heads, c10::SymInt queries, c10::SymInt keys,
                    double dropout_p) {
  constexpr const char* op = "dropout_mask";
  TORCH_CHECK_TYPE(seed.scalar_type() == at::kLong, op, ": expected seed dtype int64, got ",
                   type_name(seed.scalar_type()));
  const auto check_size = [&](const char* name, const c10::SymInt& size) {
    TORCH_CHECK_VALUE(holds(size.sym_ge(0)), op, ": expected ", name, " of 0 or more, got ", size);
  };
  check_size("batch", batch), check_size("heads", heads), check_size("queries", queries), check_size("keys", keys);
  check_length(op, "queries", queries), check_length(op, "keys", keys);
  TORCH_CHECK_VALUE(dropout_p >= 0 && dropout_p <= 1, op, ": expected dropout_p between 0 and 1, got ", dropout_p);
  const bool fits = seed.dim() == 0 || (seed.dim() == 1 && same(seed.sym_size(0), 1)) ||
                    (seed.dim() == 2 && same(seed.sym_size(0), batch) && same(seed.sym_size(1), 2));
  TORCH_CHECK_VALUE(fits, op, ": expected seed shape [1] or [", batch, ", 2], got ", seed.sym_sizes());
  return kept(seed.dim() == 0 ? seed.unsqueeze(0) : seed, batch, heads, queries, keys, dropout_p);
}

TORCH_LIBRARY_FRAGMENT(attention_ops, m) {
  const std::string arguments =
      "(Tensor seed, SymInt batch, SymInt heads, SymInt queries, SymInt keys, float dropout_p) -> Tensor";
  m.def(torch::schema(("dropout_mask" + arguments).c_str()));
  m.def(torch::schema(("_dropout_mask" + arguments).c_str()), {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(attention_ops, CompositeImplicitAutograd, m) {
  m.impl("dropout_mask", dropout_mask);
}
TORCH_LIBRARY_IMPL(attention_ops, FuncTorchBatchedDecomposition, m) {
  m.impl("dropout_mask", dropout_mask);
}
TORCH_LIBRARY_IMPL(attention_ops, Batched, m) {
  m.impl("dropout_mask", dropout_mask);
}

}  // namespace
}  // namespace attention_ops
