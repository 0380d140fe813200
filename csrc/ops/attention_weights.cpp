// attention_weights and attention_summaries: the public operators, and the schemas of their primitives.
#include <ATen/ops/aminmax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/floor_divide.h>
#include <ATen/ops/index_select.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/library.h>

#include <algorithm>

#include "ops/check.h"
#include "ops/inputs.h"

namespace attention_ops {
namespace {

// Whether values can be read here: not from a tracer's or a transform's tensor, and not across a device.
bool is_plain_cpu(const Tensor& x) {
  constexpr c10::DispatchKeySet wrapped({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                         c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
                                         c10::DispatchKey::Batched});
  return x.device().is_cpu() && !x.key_set().has_any(wrapped) && !c10::impl::dispatch_mode_enabled();
}

void check_index(const Inputs& inputs, const char* name, const Tensor& index, const c10::SymInt& size) {
  TORCH_CHECK_TYPE(index.scalar_type() == at::kLong, inputs.op, ": expected ", name, " dtype int64, got ",
                   type_name(index.scalar_type()));
  TORCH_CHECK_VALUE(index.dim() == 1, inputs.op, ": expected ", name, " with 1 dimension, got ", index.dim());
  check_device(inputs.op, name, index, inputs.query);
  if (!is_plain_cpu(index) || index.numel() == 0) return;
  const auto [lowest, highest] = at::aminmax(index);
  const auto low = lowest.item<int64_t>(), high = highest.item<int64_t>();
  TORCH_CHECK_VALUE(low >= 0 && high < size, inputs.op, ": expected ", name, " from 0 to ", size - 1, ", got ",
                    low < 0 ? low : high);
}

Tensor selected(const Tensor& x, int64_t dim, const Tensor& index) {
  return surely(x.sym_size(dim).sym_eq(1)) ? x : x.index_select(dim, index);
}

bool has_derivative(const Tensor& x) {
  return (x.requires_grad() && at::GradMode::is_enabled()) || x._fw_grad(/*level=*/0).defined();
}

// Whether lse comes from a forward over all rows: where a derivative goes through it or a transform may ask for one,
// and on other devices. Elsewhere the kernel normalises the chosen rows itself.
bool needs_lse(const Inputs& inputs, Opt heads, Opt rows) {
  std::vector<Tensor> given = inputs.mask_data;
  given.insert(given.end(), {inputs.query, inputs.key});
  for (const OptionalTensor* x : {&inputs.bias, &inputs.distance, &inputs.sinks, &heads, &rows})
    if (*x) given.push_back(**x);
  return !std::ranges::all_of(given, is_plain_cpu) || std::ranges::any_of(given, has_derivative);
}

// Query, lse, biases, sinks and keys of some heads and rows. The mask's data stays whole.
struct Selection {
  Tensor query, key, value;
  OptionalTensor lse, bias, distance, sinks;

  Selection(const Inputs& inputs, Opt lse_of_all)
      : query(inputs.query),
        key(inputs.key),
        value(inputs.value),
        lse(lse_of_all),
        bias(inputs.bias),
        distance(inputs.distance),
        sinks(inputs.sinks) {}

  void take(int64_t dim, const Tensor& index) {
    query = query.index_select(dim, index);
    if (lse) lse = lse->index_select(dim, index);
    if (bias) bias = selected(*bias, dim, index);
  }

  void take_heads(const Inputs& inputs, const Tensor& heads) {
    take(1, heads);
    if (distance) distance = selected(*distance, 1, heads);
    if (sinks) sinks = sinks->index_select(0, heads);
    if (surely(inputs.Hkv.sym_eq(1))) return;
    // Each query head comes with a key head of its own.
    const Tensor group = surely(inputs.H.sym_eq(inputs.Hkv))
                             ? heads
                             : at::floor_divide(heads, (inputs.H / inputs.Hkv).guard_int(__FILE__, __LINE__));
    key = key.index_select(1, group), value = value.index_select(1, group);
  }
};

Tensor attention_weights(In query, In key, at::TensorList mask_data, std::string_view mask, Opt bias, Opt sinks,
                         std::optional<double> scale, std::optional<double> softcap, Opt heads, Opt rows, bool average,
                         Opt distance_bias, Opt relative_key) {
  const Inputs inputs({"attention_weights", query, key, nullptr, bias, distance_bias, relative_key, Inputs::kNone,
                       sinks, mask_data, mask, scale, softcap});
  TORCH_CHECK_VALUE(!heads || inputs.rank > 2, inputs.op, ": expected heads None as query has no heads, got a tensor");
  if (heads) check_index(inputs, "heads", *heads, inputs.H);
  if (rows) check_index(inputs, "rows", *rows, inputs.Lq);
  const Attention a = inputs.attention();
  Selection s(inputs, needs_lse(inputs, heads, rows) ? OptionalTensor(std::get<1>(forward().call(a))) : std::nullopt);
  if (heads) s.take_heads(inputs, *heads);
  const auto weights_of = [&](const Selection& x, Opt chosen) {
    return weights().call({x.query, x.key, x.value, x.bias, x.distance, x.sinks, a.mask_data, a.mask, a.scale,
                           a.softcap, 0, Inputs::kNone},
                          x.lse, heads, chosen, inputs.Lq, average);
  };
  if (!rows || !s.distance || surely(rows->sym_size(0).sym_eq(0))) {
    if (rows) s.distance.reset();
    if (rows) s.take(2, *rows);
    return inputs.restore(weights_of(s, rows), !average);
  }
  // Distances of rows that are chosen are not those of their order. A bias by distance becomes a dense one of theirs;
  // with rows beside keys it is one row at a time.
  if (!s.bias && surely(s.distance->sym_size(3).sym_eq(1))) {
    const Tensor entries = at::arange(inputs.Lk, rows->options()).sub(rows->unsqueeze(1)).add(inputs.Lq - 1);
    const Tensor chosen = s.distance->select(3, 0).index_select(2, entries.flatten());
    s.take(2, *rows);
    s.bias = chosen.unflatten_symint(2, entries.sym_sizes()), s.distance.reset();
    return inputs.restore(weights_of(s, rows), !average);
  }
  std::vector<Tensor> each;
  for (const Tensor& row : rows->split(1)) {
    Selection one = s;
    one.take(2, row);
    one.distance = s.distance->index_select(2, at::arange(inputs.Lk, row.options()).sub(row).add(inputs.Lq - 1));
    each.push_back(weights_of(one, row));
  }
  return inputs.restore(at::cat(each, -2), !average);
}

Three attention_summaries(In query, In key, at::TensorList mask_data, std::string_view mask, Opt bias, Opt sinks,
                          std::optional<double> scale, std::optional<double> softcap, Opt distance_bias,
                          Opt relative_key) {
  const Inputs inputs({"attention_summaries", query, key, nullptr, bias, distance_bias, relative_key, Inputs::kNone,
                       sinks, mask_data, mask, scale, softcap});
  const Attention a = inputs.attention();
  const Tensor lse = std::get<1>(forward().call(a));
  const auto [column_sum, entropy, maximum, argmax] = summaries().call(a, lse);
  return {inputs.restore(column_sum), inputs.restore(entropy), inputs.restore(maximum)};
}

TORCH_LIBRARY_FRAGMENT(attention_ops, m) {
  m.def(
      "attention_weights(Tensor query, Tensor key, Tensor[] mask_data, str mask='', Tensor? bias=None, "
      "Tensor? sinks=None, float? scale=None, float? softcap=None, Tensor? heads=None, Tensor? rows=None, bool "
      "average=False, "
      "Tensor? distance_bias=None, Tensor? relative_key=None) -> Tensor");
  m.def(
      "attention_summaries(Tensor query, Tensor key, Tensor[] mask_data, str mask='', Tensor? bias=None, "
      "Tensor? sinks=None, float? scale=None, float? softcap=None, Tensor? distance_bias=None, Tensor? "
      "relative_key=None) -> (Tensor column_sum, Tensor entropy, Tensor "
      "maximum)");
  const auto define = [&](const std::string& name, const std::string& rest) {
    m.def(torch::schema((name + "(" + kSharedSchema + rest).c_str()), {at::Tag::pt2_compliant_tag});
  };
  const std::string of_rows = ", Tensor? heads, Tensor? rows, SymInt queries, bool average";
  const std::string chosen = ", Tensor lse" + of_rows;
  const std::string tangents = ", Tensor? query_t, Tensor? key_t, Tensor? bias_t, Tensor? distance_t, Tensor? lse_t";
  const std::string grads = ", Tensor? grad_column_sum, Tensor? grad_entropy, Tensor? grad_maximum";
  const std::string grads_t = ", Tensor? grad_column_sum_t, Tensor? grad_entropy_t, Tensor? grad_maximum_t";
  const std::string gradients =
      ", bool[5] needed) -> (Tensor grad_query, Tensor grad_key, Tensor grad_bias, Tensor grad_distance, Tensor "
      "grad_lse)";
  const std::string gradients_t =
      ", bool[5] needed) -> (Tensor grad_query_t, Tensor grad_key_t, Tensor grad_bias_t, Tensor grad_distance_t, "
      "Tensor grad_lse_t)";
  define("_attention_weights", ", Tensor? lse" + of_rows + ") -> Tensor weights");
  define("_attention_weights_backward", chosen + ", Tensor grad_weights" + gradients);
  define("_attention_weights_jvp", chosen + tangents + ") -> Tensor weights_t");
  define("_attention_weights_double_backward",
         chosen + ", Tensor grad_weights" + tangents + ", Tensor? grad_weights_t" + gradients_t);
  define("_attention_summaries", ", Tensor lse) -> (Tensor column_sum, Tensor entropy, Tensor maximum, Tensor argmax)");
  define("_attention_summaries_backward", ", Tensor lse, Tensor argmax" + grads + gradients);
  define("_attention_summaries_jvp",
         ", Tensor lse, Tensor argmax" + tangents + ") -> (Tensor column_sum_t, Tensor entropy_t, Tensor maximum_t)");
  define("_attention_summaries_double_backward",
         ", Tensor lse, Tensor argmax" + grads + tangents + grads_t + gradients_t);
}

void register_composites(torch::Library& m) {
  m.impl("attention_weights", attention_weights);
  m.impl("attention_summaries", attention_summaries);
}

TORCH_LIBRARY_IMPL(attention_ops, CompositeImplicitAutograd, m) {
  register_composites(m);
}
TORCH_LIBRARY_IMPL(attention_ops, FuncTorchBatchedDecomposition, m) {
  register_composites(m);
}
TORCH_LIBRARY_IMPL(attention_ops, Batched, m) {
  register_composites(m);
}

}  // namespace
}  // namespace attention_ops
