// Shapes of rotated rows and of what turns them.
#include <torch/library.h>

#include "ops/allocate.h"
#include "ops/ops.h"

namespace attention_ops {
namespace {

Tensor rope_table_meta(In positions, In inv_freq, at::IntArrayRef, double, at::ScalarType dtype) {
  return at::empty_symint({positions.sym_size(0), positions.sym_size(2), 2, inv_freq.sym_size(0)},
                          inv_freq.options().dtype(dtype));
}

Tensor rope_meta(In x, In, bool, bool inverse) {
  return empty_turned_like(x, inverse);
}

TORCH_LIBRARY_IMPL(attention_ops, Meta, m) {
  m.impl("_rope_table", rope_table_meta);
  m.impl("_rope", rope_meta);
}

}  // namespace
}  // namespace attention_ops
