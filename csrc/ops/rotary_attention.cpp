// Attention of turned rows: schemas, and what it is on any device.
#include "ops/rotary_attention.h"

#include <torch/library.h>

namespace attention_ops {
namespace {

TORCH_LIBRARY_FRAGMENT(attention_ops, m) {
  const auto define = [&](const std::string& name, const std::string& rest) {
    const std::string schema = name + "(" + kSharedSchema + ", Tensor table, bool interleaved" + rest;
    m.def(torch::schema(schema.c_str()), {at::Tag::pt2_compliant_tag});
  };
  define("_rotary_attention_forward", ") -> (Tensor out, Tensor lse)");
  define("_rotary_attention_backward",
         ", Tensor out, Tensor lse, Tensor? grad_out, Tensor? grad_lse, bool[6] needed) -> (Tensor grad_query, "
         "Tensor grad_key, Tensor grad_value, Tensor grad_bias, Tensor grad_distance, Tensor grad_sinks)");
}

void register_all(torch::Library& m) {
  m.impl("_rotary_attention_forward", Flat<rotary_attention>::call);
  m.impl("_rotary_attention_backward", Flat<rotary_gradients>::call);
}

TORCH_LIBRARY_IMPL(attention_ops, CompositeExplicitAutograd, m) {
  register_all(m);
}
TORCH_LIBRARY_IMPL(attention_ops, FuncTorchBatched, m) {
  register_all(m);
}
TORCH_LIBRARY_IMPL(attention_ops, Batched, m) {
  register_all(m);
}

}  // namespace
}  // namespace attention_ops
