// Shape of rotated rows.
#include <torch/library.h>

#include "ops/allocate.h"
#include "ops/ops.h"

namespace attention_ops {
namespace {

Tensor rope_meta(In x, In, In, at::IntArrayRef, bool, bool, double) {
  return empty_heads_like(x);
}

TORCH_LIBRARY_IMPL(attention_ops, Meta, m) {
  m.impl("_rope", rope_meta);
}

}  // namespace
}  // namespace attention_ops
