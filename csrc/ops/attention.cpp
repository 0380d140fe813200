// attention: the public operator, and the schemas of its primitives.
#include <ATen/ops/randint.h>
#include <torch/library.h>

#include <limits>

#include "ops/allocate.h"
#include "ops/check.h"
#include "ops/inputs.h"

namespace attention_ops {
namespace {

// [1] or [B, 2]
OptionalTensor checked_seed(const Inputs& inputs, Opt seed) {
  if (!seed) return {};
  TORCH_CHECK_TYPE(seed->scalar_type() == at::kLong, inputs.op, ": expected seed dtype int64, got ",
                   type_name(seed->scalar_type()));
  check_device(inputs.op, "seed", *seed, inputs.query);
  if (seed->dim() == 0) return seed->unsqueeze(0);
  const bool fits = seed->dim() == 1
                        ? same(seed->sym_size(0), 1)
                        : seed->dim() == 2 && same(seed->sym_size(0), inputs.B) && same(seed->sym_size(1), 2);
  TORCH_CHECK_VALUE(fits, inputs.op, ": expected seed shape [1] or [", inputs.B, ", 2], got ", seed->sym_sizes());
  return seed;
}

// The seed is drawn by torch: manual_seed, checkpoints, vmap's randomness and compilers treat it as any other draw.
OptionalTensor seed_of(const Inputs& inputs, double dropout_p, Opt seed) {
  TORCH_CHECK_VALUE(dropout_p >= 0 && dropout_p <= 1, inputs.op, ": expected dropout_p between 0 and 1, got ",
                    dropout_p);
  const OptionalTensor given = checked_seed(inputs, seed);
  if (dropout_p == 0) return {};
  if (given) return given;
  return at::randint(std::numeric_limits<int64_t>::max(), {1}, inputs.query.options().dtype(at::kLong));
}

// [B|1, Lk, 2, pairs], of rope_table
void check_rope_table(const Inputs& inputs, In table) {
  const auto type = lse_type(inputs.query);
  TORCH_CHECK_TYPE(table.scalar_type() == type, inputs.op, ": expected rope_table dtype ", type_name(type), ", got ",
                   type_name(table.scalar_type()));
  check_device(inputs.op, "rope_table", table, inputs.query);
  const bool fits = table.dim() == 4 && broadcasts(table.sym_size(0), inputs.B) && same(table.sym_size(1), inputs.Lk) &&
                    same(table.sym_size(2), 2) && holds((table.sym_size(3) * 2).sym_le(inputs.query.sym_size(3)));
  TORCH_CHECK_VALUE(fits, inputs.op, ": expected rope_table shape [", inputs.B, " or 1, ", inputs.Lk,
                    ", 2, pairs] with at most ", inputs.query.sym_size(3), " / 2 pairs, got ", table.sym_sizes());
  TORCH_CHECK_VALUE(holds(inputs.Lq.sym_le(inputs.Lk)), inputs.op, ": expected query length of at most ", inputs.Lk,
                    " with rope_table, got ", inputs.Lq);
}

Pair attention(In query, In key, In value, at::TensorList mask_data, std::string_view mask, Opt bias, Opt sinks,
               std::optional<double> scale, std::optional<double> softcap, double dropout_p, Opt seed,
               Opt distance_bias, Opt relative_key, Opt relative_value, Opt rope_table, bool interleaved) {
  const Inputs inputs({"attention", query, key, &value, bias, distance_bias, relative_key, relative_value, sinks,
                       mask_data, mask, scale, softcap});
  if (rope_table) check_rope_table(inputs, *rope_table);
  const OptionalTensor drawn = seed_of(inputs, dropout_p, seed);
  const Attention a = inputs.attention(dropout_p, drawn);
  const auto [out, lse] = rope_table ? rotary_forward().call(a, *rope_table, interleaved) : forward().call(a);
  return {inputs.restore(out), inputs.restore(lse)};
}

// With at most a mask without tensors. A call from Python takes time for each argument of the schema, given or not, and
// most for a list: small calls take three quarters of the time this way.
Pair plain_attention(In query, In key, In value, std::string_view mask) {
  return attention(query, key, value, {}, mask, {}, {}, {}, {}, 0, {}, {}, {}, {}, {}, false);
}

TORCH_LIBRARY_FRAGMENT(attention_ops, m) {
  m.def("attention.plain(Tensor query, Tensor key, Tensor value, str mask='') -> (Tensor out, Tensor lse)");
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor[] mask_data, str mask='', Tensor? bias=None, "
      "Tensor? sinks=None, float? scale=None, float? softcap=None, float dropout_p=0., Tensor? seed=None, Tensor? "
      "distance_bias=None, Tensor? relative_key=None, Tensor? relative_value=None, Tensor? rope_table=None, "
      "bool interleaved=False) -> "
      "(Tensor out, Tensor lse)");
  const auto define = [&](const std::string& name, const std::string& rest) {
    m.def(torch::schema((name + "(" + kSharedSchema + rest).c_str()), {at::Tag::pt2_compliant_tag});
  };
  define("_attention_forward", ") -> (Tensor out, Tensor lse)");
  define("_attention_backward",
         ", Tensor out, Tensor lse, Tensor? grad_out, Tensor? grad_lse, bool[6] needed) -> (Tensor grad_query, "
         "Tensor grad_key, Tensor grad_value, Tensor grad_bias, Tensor grad_distance, Tensor grad_sinks)");
  const std::string tangents =
      ", Tensor? query_t, Tensor? key_t, Tensor? value_t, Tensor? bias_t, Tensor? distance_t, Tensor? sinks_t";
  define("_attention_jvp", ", Tensor out, Tensor lse" + tangents + ") -> (Tensor out_t, Tensor lse_t)");
  define("_attention_double_backward",
         ", Tensor out, Tensor lse, Tensor? grad_out, Tensor? grad_lse" + tangents +
             ", Tensor? grad_out_t, Tensor? grad_lse_t, bool[8] needed) -> (Tensor grad_query_t, Tensor grad_key_t, "
             "Tensor grad_value_t, Tensor grad_bias_t, Tensor grad_distance_t, Tensor grad_sinks_t, Tensor out_t, "
             "Tensor lse_t)");
  // For tests: the tiles visited since the last call, and how many queries and keys a tile holds.
  m.def("_visited_tiles() -> int");
  m.def("_tile_shape(int itemsize) -> int[]");
}

void implement(torch::Library& m) {
  m.impl("attention", attention);
  m.impl("attention.plain", plain_attention);
}
TORCH_LIBRARY_IMPL(attention_ops, CompositeImplicitAutograd, m) {
  implement(m);
}
// Without these two the two vmaps find their slow loops before they find the composite.
TORCH_LIBRARY_IMPL(attention_ops, FuncTorchBatchedDecomposition, m) {
  implement(m);
}
TORCH_LIBRARY_IMPL(attention_ops, Batched, m) {
  implement(m);
}

}  // namespace
}  // namespace attention_ops
