// Derivatives of the weights and of their summaries. lse is an input of its own: its gradient flows on to the forward
// that made it, and through it to the sinks.
#include <torch/library.h>

#include "autograd/record.h"

namespace attention_ops {
namespace {

struct WeightsFormula : AttentionFormula {
  static constexpr auto name = "AttentionOpsWeightsBackward";
  c10::SymInt queries;
  bool average = false;

  void visit(auto&& f) const { AttentionFormula::visit(f), f(queries), f(average); }

  variable_list operator()(const variable_list& grads, const variable_list& saved,
                           const std::vector<bool>& needed) const {
    const Restored r(saved, constants);
    const auto [query, key, bias, lse] =
        weights_backward().call(r.attention, r.extra[0], optional(r.extra[1]), optional(r.extra[2]), queries, average,
                                grads[0], first<4>(needed));
    return keep({query, key, bias, lse}, needed);
  }
};

Tensor weights_autograd(c10::DispatchKeySet keys, const Attention& a, In lse, Opt heads, Opt rows, c10::SymInt queries,
                        bool average) {
  refuse_forward_mode("_attention_weights", a.query, a.key, a.bias, lse);
  const auto node = record<WeightsFormula>(a, a.query, a.key, a.bias, lse);
  Tensor w = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return weights().redispatch(keys & c10::after_autograd_keyset, a, lse, heads, rows, queries, average);
  }();
  if (node) {
    node->formula.queries = queries, node->formula.average = average;
    attach(node, {w});
    for (const auto& x : {lse, defined_or_not(heads), defined_or_not(rows)}) node->save(x);
    announce(node);
  }
  return w;
}

Four weights_backward_autograd(c10::DispatchKeySet keys, const Attention& a, In lse, Opt heads, Opt rows,
                               c10::SymInt queries, bool average, In grad_weights, std::array<bool, 4> needed) {
  refuse_forward_mode("_attention_weights_backward", a.query, a.key, a.bias, lse, grad_weights);
  auto [query, key, bias, grad_lse] = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return weights_backward().redispatch(keys & c10::after_autograd_keyset, a, lse, heads, rows, queries, average,
                                         grad_weights, needed);
  }();
  refuse_backward("_attention_weights_backward", {query, key, bias, grad_lse}, a.query, a.key, a.bias, lse,
                  grad_weights);
  return {query, key, bias, grad_lse};
}

struct SummariesFormula : AttentionFormula {
  static constexpr auto name = "AttentionOpsSummariesBackward";

  variable_list operator()(const variable_list& grads, const variable_list& saved,
                           const std::vector<bool>& needed) const {
    const Restored r(saved, constants);
    const auto [query, key, bias, lse] =
        summaries_backward().call(r.attention, r.extra[0], r.extra[1], optional(grads[0]), optional(grads[1]),
                                  optional(grads[2]), first<4>(needed));
    return keep({query, key, bias, lse}, needed);
  }
};

// argmax is a position, so it has no gradient; the one of maximum goes where it points.
Four summaries_autograd(c10::DispatchKeySet keys, const Attention& a, In lse) {
  refuse_forward_mode("_attention_summaries", a.query, a.key, a.bias, lse);
  const auto node = record<SummariesFormula>(a, a.query, a.key, a.bias, lse);
  auto [column_sum, entropy, maximum, argmax] = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return summaries().redispatch(keys & c10::after_autograd_keyset, a, lse);
  }();
  if (node) {
    attach(node, {column_sum, entropy, maximum});
    node->save(lse);
    node->save(argmax);
    announce(node);
  }
  return {column_sum, entropy, maximum, argmax};
}

Four summaries_backward_autograd(c10::DispatchKeySet keys, const Attention& a, In lse, In argmax, Opt grad_column_sum,
                                 Opt grad_entropy, Opt grad_maximum, std::array<bool, 4> needed) {
  constexpr const char* op = "_attention_summaries_backward";
  refuse_forward_mode(op, a.query, a.key, a.bias, lse, grad_column_sum, grad_entropy, grad_maximum);
  auto [query, key, bias, grad_lse] = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return summaries_backward().redispatch(keys & c10::after_autograd_keyset, a, lse, argmax, grad_column_sum,
                                           grad_entropy, grad_maximum, needed);
  }();
  refuse_backward(op, {query, key, bias, grad_lse}, a.query, a.key, a.bias, lse, grad_column_sum, grad_entropy,
                  grad_maximum);
  return {query, key, bias, grad_lse};
}

TORCH_LIBRARY_IMPL(attention_ops, Autograd, m) {
  m.impl("_attention_weights", Flat<weights_autograd>::call);
  m.impl("_attention_weights_backward", Flat<weights_backward_autograd>::call);
  m.impl("_attention_summaries", Flat<summaries_autograd>::call);
  m.impl("_attention_summaries_backward", Flat<summaries_backward_autograd>::call);
}

}  // namespace
}  // namespace attention_ops
