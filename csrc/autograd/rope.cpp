// Derivatives of rotary positions. The operator is linear in x, and its transpose turns the other way: every derivative
// of any order is the operator again.
#include <torch/library.h>

#include "autograd/record.h"

namespace attention_ops {
namespace {

struct RopeFormula {
  static constexpr auto name = "AttentionOpsRopeBackward";
  std::vector<int64_t> axes;
  bool interleaved = false, inverse = false;
  double factor = 1;

  static void visit(auto& self, auto&& f) { f(self.axes), f(self.interleaved), f(self.inverse), f(self.factor); }

  variable_list operator()(const variable_list& grads, const variable_list& saved, const std::vector<bool>&) const {
    return {rope().call(grads[0], saved[0], saved[1], axes, interleaved, !inverse, factor)};
  }
};

Tensor rope_autograd(c10::DispatchKeySet keys, In x, In positions, In inv_freq, at::IntArrayRef axes, bool interleaved,
                     bool inverse, double factor) {
  if (any_has_tangent(positions, inv_freq) || any_requires_grad(positions, inv_freq))
    refuse("_rope", "positions and inv_freq without gradients or tangents, got some");
  decltype(make_node<FormulaNode<RopeFormula>>()) node;
  if (any_requires_grad(x)) {
    node = make_node<FormulaNode<RopeFormula>>();
    node->set_next_edges(torch::autograd::collect_next_edges(x));
    node->formula = {axes.vec(), interleaved, inverse, factor};
    save_all(node, positions, inv_freq);
  }
  const Tensor out = below_autograd([&] {
    return rope().redispatch(keys & c10::after_autograd_keyset, x, positions, inv_freq, axes, interleaved, inverse,
                             factor);
  });
  if (node) attach(node, {out});
  if (const OptionalTensor x_t = tangent(x))
    set_tangents({out}, {rope().call(*x_t, positions, inv_freq, axes, interleaved, inverse, factor)});
  if (node) announce(node);
  return out;
}

TORCH_LIBRARY_IMPL(attention_ops, Autograd, m) {
  m.impl("_rope", rope_autograd);
}

}  // namespace
}  // namespace attention_ops
