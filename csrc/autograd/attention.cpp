// Derivatives of attention, written as torch's own kernels are: a node per call. Inside, everything is a dispatcher
// call, so that each derivative vmaps, compiles and is checked as its operator is.
#include <torch/library.h>

#include "autograd/record.h"

namespace attention_ops {
namespace {

struct ForwardFormula : AttentionFormula {
  static constexpr auto name = "AttentionOpsAttentionBackward";

  variable_list operator()(const variable_list& grads, const variable_list& saved,
                           const std::vector<bool>& needed) const {
    const Restored r(saved, constants);
    const auto [query, key, value, bias, sinks] =
        backward().call(r.attention, r.extra[0], r.extra[1], optional(grads[0]), optional(grads[1]), first<5>(needed));
    return keep({query, key, value, bias, sinks}, needed);
  }
};

Pair forward_autograd(c10::DispatchKeySet keys, const Attention& a) {
  refuse_forward_mode("_attention_forward", a.query, a.key, a.value, a.bias, a.sinks);
  const auto node = record<ForwardFormula>(a, a.query, a.key, a.value, a.bias, a.sinks);
  auto [out, lse] = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return forward().redispatch(keys & c10::after_autograd_keyset, a);
  }();
  if (node) {
    attach(node, {out, lse});
    node->save(out, /*is_output=*/true);
    node->save(lse, true);
    announce(node);
  }
  return {std::move(out), std::move(lse)};
}

// out and lse are caches of the forward: no derivative goes through them.
Five backward_autograd(c10::DispatchKeySet keys, const Attention& a, In out, In lse, Opt grad_out, Opt grad_lse,
                       std::array<bool, 5> needed) {
  refuse_forward_mode("_attention_backward", a.query, a.key, a.value, a.bias, a.sinks, grad_out, grad_lse);
  auto [query, key, value, bias, sinks] = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return backward().redispatch(keys & c10::after_autograd_keyset, a, out, lse, grad_out, grad_lse, needed);
  }();
  refuse_backward("_attention_backward", {query, key, value, bias, sinks}, a.query, a.key, a.value, a.bias, a.sinks,
                  grad_out, grad_lse);
  return {query, key, value, bias, sinks};
}

TORCH_LIBRARY_IMPL(attention_ops, Autograd, m) {
  m.impl("_attention_forward", Flat<forward_autograd>::call);
  m.impl("_attention_backward", Flat<backward_autograd>::call);
}

}  // namespace
}  // namespace attention_ops
