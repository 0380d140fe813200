// Derivatives of the weights and of their summaries. lse is an input of its own: its gradient flows on to the forward
// that made it, and through it to the sinks.
#include <torch/library.h>

#include "autograd/record.h"

namespace attention_ops {
namespace {

using Needed = std::array<bool, 5>;

// What the nodes of weights have beside the shared arguments: extra tensors lse, heads, rows, and what a node adds.
struct SelectionFormula : AttentionFormula {
  c10::SymInt queries;
  bool average = false;

  static void visit(auto& self, auto&& f) { AttentionFormula::visit(self, f), f(self.queries), f(self.average); }
};

struct WeightsFormula : SelectionFormula {
  static constexpr auto name = "AttentionOpsWeightsBackward";

  variable_list operator()(const variable_list& grads, const variable_list& saved,
                           const std::vector<bool>& needed) const {
    const Restored r(saved, constants);
    const auto [query, key, bias, distance, lse] =
        weights_backward().call(r.attention, r.extra[0], optional(r.extra[1]), optional(r.extra[2]), queries, average,
                                grads[0], slice<5>(needed));
    return keep({query, key, bias, distance, lse}, needed);
  }
};

// The gradient of the gradients: along what arrives for them.
struct WeightsDoubleFormula : SelectionFormula {
  static constexpr auto name = "AttentionOpsWeightsDoubleBackward";

  variable_list operator()(const variable_list& grads, const variable_list& saved,
                           const std::vector<bool>& needed) const {
    const Restored r(saved, constants);
    const OptionalTensor heads = optional(r.extra[1]), rows = optional(r.extra[2]);
    const OptionalTensor query_t = optional(grads[0]), key_t = optional(grads[1]), bias_t = optional(grads[2]),
                         distance_t = optional(grads[3]), lse_t = optional(grads[4]);
    const auto [query, key, bias, distance, lse] =
        weights_double_backward().call(r.attention, r.extra[0], heads, rows, queries, average, r.extra[3], query_t,
                                       key_t, bias_t, distance_t, lse_t, {}, slice<5>(needed));
    const Tensor weights_t = needed[5] ? weights_jvp().call(r.attention, r.extra[0], heads, rows, queries, average,
                                                            query_t, key_t, bias_t, distance_t, lse_t)
                                       : Tensor();
    return keep({query, key, bias, distance, lse, weights_t}, needed);
  }
};

// The gradient of the tangents: of the inputs along the tangents, and of these by the backward, since they are linear.
struct WeightsJvpFormula : SelectionFormula {
  static constexpr auto name = "AttentionOpsWeightsJvpBackward";

  variable_list operator()(const variable_list& grads, const variable_list& saved,
                           const std::vector<bool>& needed) const {
    const Restored r(saved, constants);
    const OptionalTensor heads = optional(r.extra[1]), rows = optional(r.extra[2]);
    const auto [query, key, bias, distance, lse] = weights_double_backward().call(
        r.attention, r.extra[0], heads, rows, queries, average, grads[0], optional(r.extra[3]), optional(r.extra[4]),
        optional(r.extra[5]), optional(r.extra[6]), optional(r.extra[7]), {}, slice<5>(needed));
    const auto [query_t, key_t, bias_t, distance_t, lse_t] =
        weights_backward().call(r.attention, r.extra[0], heads, rows, queries, average, grads[0], slice<5>(needed, 5));
    return keep({query, key, bias, distance, lse, query_t, key_t, bias_t, distance_t, lse_t}, needed);
  }
};

// Linear in the tangents, with a symmetric matrix where they are those of the inputs.
struct WeightsDoubleBackwardFormula : SelectionFormula {
  static constexpr auto name = "AttentionOpsWeightsDoubleBackwardBackward";

  variable_list operator()(const variable_list& grads, const variable_list& saved,
                           const std::vector<bool>& needed) const {
    refuse_third_derivatives("_attention_weights_double_backward", needed, 6);
    return WeightsDoubleFormula{*this}(grads, saved, needed);
  }
};

template <class Node>
void save_selection(const Node& node, const c10::SymInt& queries, bool average, Opt lse, Opt heads, Opt rows) {
  node->formula.queries = queries, node->formula.average = average;
  save_all(node, lse, heads, rows);
}

Tensor weights_autograd(c10::DispatchKeySet keys, const Attention& a, Opt lse, Opt heads, Opt rows, c10::SymInt queries,
                        bool average) {
  if (!lse)
    refuse_derivatives("_attention_weights", "query, key, biases and sinks, with lse None,", a.query, a.key, a.bias,
                       a.distance, a.sinks);
  const auto node = record<WeightsFormula>(a, a.query, a.key, a.bias, a.distance, lse);
  if (node) save_selection(node, queries, average, lse, heads, rows);
  Tensor w = below_autograd(
      [&] { return weights().redispatch(keys & c10::after_autograd_keyset, a, lse, heads, rows, queries, average); });
  if (node) attach(node, {w});
  if (any_has_tangent(a.query, a.key, a.bias, a.distance, lse)) {
    const Primals p(a);
    set_tangents({w}, {weights_jvp().call(p.view(), primal(*lse), heads, rows, queries, average, tangent(a.query),
                                          tangent(a.key), tangent(a.bias), tangent(a.distance), tangent(lse))});
  }
  if (node) announce(node);
  return w;
}

Five weights_backward_autograd(c10::DispatchKeySet keys, const Attention& a, In lse, Opt heads, Opt rows,
                               c10::SymInt queries, bool average, In grad_weights, Needed needed) {
  const auto node = record<WeightsDoubleFormula>(a, a.query, a.key, a.bias, a.distance, lse, grad_weights);
  if (node) {
    save_selection(node, queries, average, lse, heads, rows);
    node->save(grad_weights);
  }
  auto [query, key, bias, distance, grad_lse] = below_autograd([&] {
    return weights_backward().redispatch(keys & c10::after_autograd_keyset, a, lse, heads, rows, queries, average,
                                         grad_weights, needed);
  });
  if (node) attach(node, {query, key, bias, distance, grad_lse}, needed);
  if (any_has_tangent(a.query, a.key, a.bias, a.distance, lse, grad_weights)) {
    const Primals p(a);
    const auto [query_t, key_t, bias_t, distance_t, lse_t] = weights_double_backward().call(
        p.view(), primal(lse), heads, rows, queries, average, primal(grad_weights), tangent(a.query), tangent(a.key),
        tangent(a.bias), tangent(a.distance), tangent(lse), tangent(grad_weights), needed);
    set_tangents({query, key, bias, distance, grad_lse}, {query_t, key_t, bias_t, distance_t, lse_t});
  }
  if (node) announce(node);
  return {query, key, bias, distance, grad_lse};
}

Tensor weights_jvp_autograd(c10::DispatchKeySet keys, const Attention& a, In lse, Opt heads, Opt rows,
                            c10::SymInt queries, bool average, Opt query_t, Opt key_t, Opt bias_t, Opt distance_t,
                            Opt lse_t) {
  refuse_tangents("_attention_weights_jvp", a.query, a.key, a.bias, a.distance, lse, query_t, key_t, bias_t, distance_t,
                  lse_t);
  const auto node =
      record<WeightsJvpFormula>(a, a.query, a.key, a.bias, a.distance, lse, query_t, key_t, bias_t, distance_t, lse_t);
  if (node) {
    save_selection(node, queries, average, lse, heads, rows);
    save_all(node, query_t, key_t, bias_t, distance_t, lse_t);
  }
  Tensor weights_t = below_autograd([&] {
    return weights_jvp().redispatch(keys & c10::after_autograd_keyset, a, lse, heads, rows, queries, average, query_t,
                                    key_t, bias_t, distance_t, lse_t);
  });
  if (node) {
    attach(node, {weights_t});
    announce(node);
  }
  return weights_t;
}

Five weights_double_backward_autograd(c10::DispatchKeySet keys, const Attention& a, In lse, Opt heads, Opt rows,
                                      c10::SymInt queries, bool average, In grad_weights, Opt query_t, Opt key_t,
                                      Opt bias_t, Opt distance_t, Opt lse_t, Opt grad_weights_t, Needed needed) {
  refuse_tangents("_attention_weights_double_backward", a.query, a.key, a.bias, a.distance, lse, grad_weights, query_t,
                  key_t, bias_t, distance_t, lse_t, grad_weights_t);
  const auto node = record<WeightsDoubleBackwardFormula>(a, query_t, key_t, bias_t, distance_t, lse_t, grad_weights_t,
                                                         a.query, a.key, a.bias, a.distance, lse, grad_weights);
  if (node) {
    save_selection(node, queries, average, lse, heads, rows);
    node->save(grad_weights);
  }
  auto [query, key, bias, distance, grad_lse] = below_autograd([&] {
    return weights_double_backward().redispatch(keys & c10::after_autograd_keyset, a, lse, heads, rows, queries,
                                                average, grad_weights, query_t, key_t, bias_t, distance_t, lse_t,
                                                grad_weights_t, needed);
  });
  if (node) {
    attach(node, {query, key, bias, distance, grad_lse}, needed);
    announce(node);
  }
  return {query, key, bias, distance, grad_lse};
}

struct SummariesFormula : AttentionFormula {
  static constexpr auto name = "AttentionOpsSummariesBackward";

  variable_list operator()(const variable_list& grads, const variable_list& saved,
                           const std::vector<bool>& needed) const {
    const Restored r(saved, constants);
    const auto [query, key, bias, distance, lse] =
        summaries_backward().call(r.attention, r.extra[0], r.extra[1], optional(grads[0]), optional(grads[1]),
                                  optional(grads[2]), slice<5>(needed));
    return keep({query, key, bias, distance, lse}, needed);
  }
};

struct SummariesDoubleFormula : AttentionFormula {
  static constexpr auto name = "AttentionOpsSummariesDoubleBackward";

  variable_list operator()(const variable_list& grads, const variable_list& saved,
                           const std::vector<bool>& needed) const {
    const Restored r(saved, constants);
    const OptionalTensor query_t = optional(grads[0]), key_t = optional(grads[1]), bias_t = optional(grads[2]),
                         distance_t = optional(grads[3]), lse_t = optional(grads[4]);
    const auto [query, key, bias, distance, lse] = summaries_double_backward().call(
        r.attention, r.extra[0], r.extra[1], optional(r.extra[2]), optional(r.extra[3]), optional(r.extra[4]), query_t,
        key_t, bias_t, distance_t, lse_t, {}, {}, {}, slice<5>(needed));
    Three own;
    if (needed[5] || needed[6] || needed[7])
      own = summaries_jvp().call(r.attention, r.extra[0], r.extra[1], query_t, key_t, bias_t, distance_t, lse_t);
    return keep({query, key, bias, distance, lse, std::get<0>(own), std::get<1>(own), std::get<2>(own)}, needed);
  }
};

struct SummariesJvpFormula : AttentionFormula {
  static constexpr auto name = "AttentionOpsSummariesJvpBackward";

  variable_list operator()(const variable_list& grads, const variable_list& saved,
                           const std::vector<bool>& needed) const {
    const Restored r(saved, constants);
    const OptionalTensor column_sum = optional(grads[0]), entropy = optional(grads[1]), maximum = optional(grads[2]);
    const auto [query, key, bias, distance, lse] = summaries_double_backward().call(
        r.attention, r.extra[0], r.extra[1], column_sum, entropy, maximum, optional(r.extra[2]), optional(r.extra[3]),
        optional(r.extra[4]), optional(r.extra[5]), optional(r.extra[6]), {}, {}, {}, slice<5>(needed));
    const auto [query_t, key_t, bias_t, distance_t, lse_t] = summaries_backward().call(
        r.attention, r.extra[0], r.extra[1], column_sum, entropy, maximum, slice<5>(needed, 5));
    return keep({query, key, bias, distance, lse, query_t, key_t, bias_t, distance_t, lse_t}, needed);
  }
};

struct SummariesDoubleBackwardFormula : AttentionFormula {
  static constexpr auto name = "AttentionOpsSummariesDoubleBackwardBackward";

  variable_list operator()(const variable_list& grads, const variable_list& saved,
                           const std::vector<bool>& needed) const {
    refuse_third_derivatives("_attention_summaries_double_backward", needed, 8);
    return SummariesDoubleFormula{*this}(grads, saved, needed);
  }
};

// argmax is a position, so it has no gradient; the one of maximum goes where it points.
Four summaries_autograd(c10::DispatchKeySet keys, const Attention& a, In lse) {
  const auto node = record<SummariesFormula>(a, a.query, a.key, a.bias, a.distance, lse);
  auto [column_sum, entropy, maximum, argmax] =
      below_autograd([&] { return summaries().redispatch(keys & c10::after_autograd_keyset, a, lse); });
  if (node) attach(node, {column_sum, entropy, maximum});
  if (any_has_tangent(a.query, a.key, a.bias, a.distance, lse)) {
    const Primals p(a);
    const auto [column_sum_t, entropy_t, maximum_t] =
        summaries_jvp().call(p.view(), primal(lse), argmax, tangent(a.query), tangent(a.key), tangent(a.bias),
                             tangent(a.distance), tangent(lse));
    set_tangents({column_sum, entropy, maximum}, {column_sum_t, entropy_t, maximum_t});
  }
  if (node) {
    save_all(node, lse, argmax);
    announce(node);
  }
  return {column_sum, entropy, maximum, argmax};
}

Five summaries_backward_autograd(c10::DispatchKeySet keys, const Attention& a, In lse, In argmax, Opt grad_column_sum,
                                 Opt grad_entropy, Opt grad_maximum, Needed needed) {
  const auto node = record<SummariesDoubleFormula>(a, a.query, a.key, a.bias, a.distance, lse, grad_column_sum,
                                                   grad_entropy, grad_maximum);
  if (node) save_all(node, lse, argmax, grad_column_sum, grad_entropy, grad_maximum);
  auto [query, key, bias, distance, grad_lse] = below_autograd([&] {
    return summaries_backward().redispatch(keys & c10::after_autograd_keyset, a, lse, argmax, grad_column_sum,
                                           grad_entropy, grad_maximum, needed);
  });
  if (node) attach(node, {query, key, bias, distance, grad_lse}, needed);
  if (any_has_tangent(a.query, a.key, a.bias, a.distance, lse, grad_column_sum, grad_entropy, grad_maximum)) {
    const Primals p(a);
    const auto [query_t, key_t, bias_t, distance_t, lse_t] = summaries_double_backward().call(
        p.view(), primal(lse), argmax, primal(grad_column_sum), primal(grad_entropy), primal(grad_maximum),
        tangent(a.query), tangent(a.key), tangent(a.bias), tangent(a.distance), tangent(lse), tangent(grad_column_sum),
        tangent(grad_entropy), tangent(grad_maximum), needed);
    set_tangents({query, key, bias, distance, grad_lse}, {query_t, key_t, bias_t, distance_t, lse_t});
  }
  if (node) announce(node);
  return {query, key, bias, distance, grad_lse};
}

Three summaries_jvp_autograd(c10::DispatchKeySet keys, const Attention& a, In lse, In argmax, Opt query_t, Opt key_t,
                             Opt bias_t, Opt distance_t, Opt lse_t) {
  refuse_tangents("_attention_summaries_jvp", a.query, a.key, a.bias, a.distance, lse, query_t, key_t, bias_t,
                  distance_t, lse_t);
  const auto node = record<SummariesJvpFormula>(a, a.query, a.key, a.bias, a.distance, lse, query_t, key_t, bias_t,
                                                distance_t, lse_t);
  if (node) save_all(node, lse, argmax, query_t, key_t, bias_t, distance_t, lse_t);
  auto [column_sum, entropy, maximum] = below_autograd([&] {
    return summaries_jvp().redispatch(keys & c10::after_autograd_keyset, a, lse, argmax, query_t, key_t, bias_t,
                                      distance_t, lse_t);
  });
  if (node) {
    attach(node, {column_sum, entropy, maximum});
    announce(node);
  }
  return {column_sum, entropy, maximum};
}

Five summaries_double_backward_autograd(c10::DispatchKeySet keys, const Attention& a, In lse, In argmax,
                                        Opt grad_column_sum, Opt grad_entropy, Opt grad_maximum, Opt query_t, Opt key_t,
                                        Opt bias_t, Opt distance_t, Opt lse_t, Opt grad_column_sum_t,
                                        Opt grad_entropy_t, Opt grad_maximum_t, Needed needed) {
  refuse_tangents("_attention_summaries_double_backward", a.query, a.key, a.bias, a.distance, lse, grad_column_sum,
                  grad_entropy, grad_maximum, query_t, key_t, bias_t, distance_t, lse_t, grad_column_sum_t,
                  grad_entropy_t, grad_maximum_t);
  const auto node = record<SummariesDoubleBackwardFormula>(
      a, query_t, key_t, bias_t, distance_t, lse_t, grad_column_sum_t, grad_entropy_t, grad_maximum_t, a.query, a.key,
      a.bias, a.distance, lse, grad_column_sum, grad_entropy, grad_maximum);
  if (node) save_all(node, lse, argmax, grad_column_sum, grad_entropy, grad_maximum);
  auto [query, key, bias, distance, grad_lse] = below_autograd([&] {
    return summaries_double_backward().redispatch(keys & c10::after_autograd_keyset, a, lse, argmax, grad_column_sum,
                                                  grad_entropy, grad_maximum, query_t, key_t, bias_t, distance_t, lse_t,
                                                  grad_column_sum_t, grad_entropy_t, grad_maximum_t, needed);
  });
  if (node) {
    attach(node, {query, key, bias, distance, grad_lse}, needed);
    announce(node);
  }
  return {query, key, bias, distance, grad_lse};
}

TORCH_LIBRARY_IMPL(attention_ops, Autograd, m) {
  m.impl("_attention_weights", Flat<weights_autograd>::call);
  m.impl("_attention_weights_backward", Flat<weights_backward_autograd>::call);
  m.impl("_attention_weights_jvp", Flat<weights_jvp_autograd>::call);
  m.impl("_attention_weights_double_backward", Flat<weights_double_backward_autograd>::call);
  m.impl("_attention_summaries", Flat<summaries_autograd>::call);
  m.impl("_attention_summaries_backward", Flat<summaries_backward_autograd>::call);
  m.impl("_attention_summaries_jvp", Flat<summaries_jvp_autograd>::call);
  m.impl("_attention_summaries_double_backward", Flat<summaries_double_backward_autograd>::call);
}

}  // namespace
}  // namespace attention_ops
