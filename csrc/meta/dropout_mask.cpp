// Shape of a dropout mask.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops/ops.h"

namespace attention_ops {
namespace {

Tensor dropout_mask_meta(In seed, c10::SymInt B, c10::SymInt H, c10::SymInt Lq, c10::SymInt Lk, double) {
  return at::empty_symint({B, H, Lq, Lk}, seed.options().dtype(at::kBool));
}

TORCH_LIBRARY_IMPL(attention_ops, Meta, m) {
  m.impl("_dropout_mask", dropout_mask_meta);
}

}  // namespace
}  // namespace attention_ops
