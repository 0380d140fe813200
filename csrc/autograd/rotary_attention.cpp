// Derivatives of attention with turned rows. They are turned again for each instead of being kept, and gradients are
// turned back.
#include "ops/rotary_attention.h"

#include <torch/library.h>

#include "autograd/record.h"

namespace attention_ops {
namespace {

struct RotaryFormula : AttentionFormula {
  static constexpr auto name = "AttentionOpsRotaryAttentionBackward";
  bool interleaved = false;

  static void visit(auto& self, auto&& f) { AttentionFormula::visit(self, f), f(self.interleaved); }

  variable_list operator()(const variable_list& grads, const variable_list& saved,
                           const std::vector<bool>& needed) const {
    const Restored r(saved, constants);
    const auto [query, key, value, bias, distance, sinks] =
        rotary_backward().call(r.attention, r.extra[0], interleaved, r.extra[1], r.extra[2], optional(grads[0]),
                               optional(grads[1]), slice<6>(needed));
    return keep({query, key, value, bias, distance, sinks}, needed);
  }
};

Pair rotary_autograd(c10::DispatchKeySet keys, const Attention& a, In table, bool interleaved) {
  refuse_derivatives("_rotary_attention_forward", "table", table);
  const auto node = record<RotaryFormula>(a, a.query, a.key, a.value, a.bias, a.distance, a.sinks);
  auto [out, lse] = below_autograd(
      [&] { return rotary_forward().redispatch(keys & c10::after_autograd_keyset, a, table, interleaved); });
  if (node) node->formula.interleaved = interleaved, attach(node, {out, lse});
  if (any_has_tangent(a.query, a.key, a.value, a.bias, a.distance, a.sinks)) {
    const auto turn = turning(interleaved, /*inverse=*/false);
    const Primals p(a);
    const Attention primals = p.view();
    OptionalTensor query_t = tangent(a.query), key_t = tangent(a.key);
    if (query_t) query_t = turn(*query_t, rows_of_queries(table, *query_t));
    if (key_t) key_t = turn(*key_t, table);
    const auto [out_t, lse_t] = jvp().call(Turned(primals, table, turn).view(), out, lse, query_t, key_t,
                                           tangent(a.value), tangent(a.bias), tangent(a.distance), tangent(a.sinks));
    set_tangents({out, lse}, {out_t, lse_t});
  }
  if (node) {  // only now: a saved output keeps the tangent that it has
    save_all(node, table);
    node->save(out, /*is_output=*/true);
    node->save(lse, true);
    announce(node);
  }
  return {std::move(out), std::move(lse)};
}

// Where a second derivative is recorded, by the operators that have one.
Six rotary_backward_autograd(c10::DispatchKeySet keys, const Attention& a, In table, bool interleaved, In out, In lse,
                             Opt grad_out, Opt grad_lse, std::array<bool, 6> needed) {
  const auto any = [&](auto&& asks) {
    return asks(a.query, a.key, a.value, a.bias, a.distance, a.sinks, grad_out, grad_lse);
  };
  if (any([](const auto&... x) { return any_requires_grad(x...) || any_has_tangent(x...); }))
    return rotary_gradients(a, table, interleaved, out, lse, grad_out, grad_lse, needed);
  return below_autograd([&] {
    return rotary_backward().redispatch(keys & c10::after_autograd_keyset, a, table, interleaved, out, lse, grad_out,
                                        grad_lse, needed);
  });
}

TORCH_LIBRARY_IMPL(attention_ops, Autograd, m) {
  m.impl("_rotary_attention_forward", Flat<rotary_autograd>::call);
  m.impl("_rotary_attention_backward", Flat<rotary_backward_autograd>::call);
}

}  // namespace
}  // namespace attention_ops
