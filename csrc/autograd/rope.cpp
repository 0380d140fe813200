// Derivatives of rotary positions. The operator is linear in x, and its transpose turns the other way: every derivative
// of any order is the operator again.
#include <torch/library.h>

#include "autograd/record.h"

namespace attention_ops {
namespace {

struct RopeFormula {
  static constexpr auto name = "AttentionOpsRopeBackward";
  bool interleaved = false, inverse = false;

  static void visit(auto& self, auto&& f) { f(self.interleaved), f(self.inverse); }

  variable_list operator()(const variable_list& grads, const variable_list& saved, const std::vector<bool>&) const {
    return {rope().call(grads[0], saved[0], interleaved, !inverse)};
  }
};

Tensor rope_autograd(c10::DispatchKeySet keys, In x, In table, bool interleaved, bool inverse) {
  refuse_derivatives("_rope", "table", table);
  decltype(make_node<FormulaNode<RopeFormula>>()) node;
  if (any_requires_grad(x)) {
    node = make_node<FormulaNode<RopeFormula>>();
    node->set_next_edges(torch::autograd::collect_next_edges(x));
    node->formula = {interleaved, inverse};
    node->save(table);
  }
  const Tensor out = below_autograd(
      [&] { return rope().redispatch(keys & c10::after_autograd_keyset, x, table, interleaved, inverse); });
  if (node) attach(node, {out});
  if (const OptionalTensor x_t = tangent(x)) set_tangents({out}, {rope().call(*x_t, table, interleaved, inverse)});
  if (node) announce(node);
  return out;
}

Tensor rope_table_autograd(c10::DispatchKeySet keys, In positions, In inv_freq, at::IntArrayRef axes, double factor,
                           at::ScalarType dtype) {
  refuse_derivatives("_rope_table", "positions and inv_freq", positions, inv_freq);
  return below_autograd([&] {
    return rope_table().redispatch(keys & c10::after_autograd_keyset, positions, inv_freq, axes, factor, dtype);
  });
}

TORCH_LIBRARY_IMPL(attention_ops, Autograd, m) {
  m.impl("_rope_table", rope_table_autograd);
  m.impl("_rope", rope_autograd);
}

}  // namespace
}  // namespace attention_ops
