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
    const auto [query, key, value, bias, distance, sinks] =
        backward().call(r.attention, r.extra[0], r.extra[1], optional(grads[0]), optional(grads[1]), slice<6>(needed));
    return keep({query, key, value, bias, distance, sinks}, needed);
  }
};

// The gradient of the gradients: along what arrives for them.
struct BackwardFormula : AttentionFormula {
  static constexpr auto name = "AttentionOpsAttentionDoubleBackward";

  variable_list operator()(const variable_list& grads, const variable_list& saved,
                           const std::vector<bool>& needed) const {
    const Restored r(saved, constants);
    const auto [query, key, value, bias, distance, sinks, out, lse] =
        double_backward().call(r.attention, r.extra[0], r.extra[1], optional(r.extra[2]), optional(r.extra[3]),
                               optional(grads[0]), optional(grads[1]), optional(grads[2]), optional(grads[3]),
                               optional(grads[4]), optional(grads[5]), {}, {}, slice<8>(needed));
    return keep({query, key, value, bias, distance, sinks, out, lse}, needed);
  }
};

// The gradient of the tangents: of the inputs along the tangents, and of these by `backward`, since jvp is linear.
struct JvpFormula : AttentionFormula {
  static constexpr auto name = "AttentionOpsAttentionJvpBackward";

  variable_list operator()(const variable_list& grads, const variable_list& saved,
                           const std::vector<bool>& needed) const {
    const Restored r(saved, constants);
    const OptionalTensor grad_out = optional(grads[0]), grad_lse = optional(grads[1]);
    const std::array<bool, 8> inputs{needed[0], needed[1], needed[2], needed[3], needed[4], needed[5], false, false};
    const auto [query, key, value, bias, distance, sinks, out, lse] = double_backward().call(
        r.attention, r.extra[0], r.extra[1], grad_out, grad_lse, optional(r.extra[2]), optional(r.extra[3]),
        optional(r.extra[4]), optional(r.extra[5]), optional(r.extra[6]), optional(r.extra[7]), {}, {}, inputs);
    const auto [query_t, key_t, value_t, bias_t, distance_t, sinks_t] =
        backward().call(r.attention, r.extra[0], r.extra[1], grad_out, grad_lse, slice<6>(needed, 6));
    return keep({query, key, value, bias, distance, sinks, query_t, key_t, value_t, bias_t, distance_t, sinks_t},
                needed);
  }
};

// The second derivative of <out, grad_out> + <lse, grad_lse>, a symmetric matrix, times the tangents: so is its
// gradient.
struct DoubleBackwardFormula : AttentionFormula {
  static constexpr auto name = "AttentionOpsAttentionDoubleBackwardBackward";

  variable_list operator()(const variable_list& grads, const variable_list& saved,
                           const std::vector<bool>& needed) const {
    refuse_third_derivatives("_attention_double_backward", needed, 8);
    const Restored r(saved, constants);
    const auto [query, key, value, bias, distance, sinks, out, lse] = double_backward().call(
        r.attention, r.extra[0], r.extra[1], optional(r.extra[2]), optional(r.extra[3]), optional(grads[0]),
        optional(grads[1]), optional(grads[2]), optional(grads[3]), optional(grads[4]), optional(grads[5]),
        optional(grads[6]), optional(grads[7]), slice<8>(needed));
    return keep({query, key, value, bias, distance, sinks, out, lse}, needed);
  }
};

Pair forward_autograd(c10::DispatchKeySet keys, const Attention& a) {
  const auto node = record<ForwardFormula>(a, a.query, a.key, a.value, a.bias, a.distance, a.sinks);
  auto [out, lse] = below_autograd([&] { return forward().redispatch(keys & c10::after_autograd_keyset, a); });
  if (node) attach(node, {out, lse});
  if (any_has_tangent(a.query, a.key, a.value, a.bias, a.distance, a.sinks)) {
    const Primals p(a);
    const auto [out_t, lse_t] = jvp().call(p.view(), out, lse, tangent(a.query), tangent(a.key), tangent(a.value),
                                           tangent(a.bias), tangent(a.distance), tangent(a.sinks));
    set_tangents({out, lse}, {out_t, lse_t});
  }
  if (node) {  // only now: a saved output keeps the tangent that it has
    node->save(out, /*is_output=*/true);
    node->save(lse, true);
    announce(node);
  }
  return {std::move(out), std::move(lse)};
}

// out and lse are caches of the forward: no derivative goes through them.
Six backward_autograd(c10::DispatchKeySet keys, const Attention& a, In out, In lse, Opt grad_out, Opt grad_lse,
                      std::array<bool, 6> needed) {
  const auto node =
      record<BackwardFormula>(a, a.query, a.key, a.value, a.bias, a.distance, a.sinks, grad_out, grad_lse);
  if (node) save_all(node, out, lse, grad_out, grad_lse);
  auto [query, key, value, bias, distance, sinks] = below_autograd([&] {
    return backward().redispatch(keys & c10::after_autograd_keyset, a, out, lse, grad_out, grad_lse, needed);
  });
  if (node) attach(node, {query, key, value, bias, distance, sinks}, needed);
  if (any_has_tangent(a.query, a.key, a.value, a.bias, a.distance, a.sinks, grad_out, grad_lse)) {
    const Primals p(a);
    const auto [query_t, key_t, value_t, bias_t, distance_t, sinks_t, out_t, lse_t] = double_backward().call(
        p.view(), primal(out), primal(lse), primal(grad_out), primal(grad_lse), tangent(a.query), tangent(a.key),
        tangent(a.value), tangent(a.bias), tangent(a.distance), tangent(a.sinks), tangent(grad_out), tangent(grad_lse),
        {needed[0], needed[1], needed[2], needed[3], needed[4], needed[5], false, false});
    set_tangents({query, key, value, bias, distance, sinks}, {query_t, key_t, value_t, bias_t, distance_t, sinks_t});
  }
  if (node) announce(node);
  return {query, key, value, bias, distance, sinks};
}

Pair jvp_autograd(c10::DispatchKeySet keys, const Attention& a, In out, In lse, Opt query_t, Opt key_t, Opt value_t,
                  Opt bias_t, Opt distance_t, Opt sinks_t) {
  refuse_tangents("_attention_jvp", a.query, a.key, a.value, a.bias, a.distance, a.sinks, query_t, key_t, value_t,
                  bias_t, distance_t, sinks_t);
  const auto node = record<JvpFormula>(a, a.query, a.key, a.value, a.bias, a.distance, a.sinks, query_t, key_t, value_t,
                                       bias_t, distance_t, sinks_t);
  if (node) save_all(node, out, lse, query_t, key_t, value_t, bias_t, distance_t, sinks_t);
  auto [out_t, lse_t] = below_autograd([&] {
    return jvp().redispatch(keys & c10::after_autograd_keyset, a, out, lse, query_t, key_t, value_t, bias_t, distance_t,
                            sinks_t);
  });
  if (node) {
    attach(node, {out_t, lse_t});
    announce(node);
  }
  return {out_t, lse_t};
}

Eight double_backward_autograd(c10::DispatchKeySet keys, const Attention& a, In out, In lse, Opt grad_out, Opt grad_lse,
                               Opt query_t, Opt key_t, Opt value_t, Opt bias_t, Opt distance_t, Opt sinks_t,
                               Opt grad_out_t, Opt grad_lse_t, std::array<bool, 8> needed) {
  refuse_tangents("_attention_double_backward", a.query, a.key, a.value, a.bias, a.distance, a.sinks, grad_out,
                  grad_lse, query_t, key_t, value_t, bias_t, distance_t, sinks_t, grad_out_t, grad_lse_t);
  const auto node =
      record<DoubleBackwardFormula>(a, query_t, key_t, value_t, bias_t, distance_t, sinks_t, grad_out_t, grad_lse_t,
                                    a.query, a.key, a.value, a.bias, a.distance, a.sinks, grad_out, grad_lse);
  if (node) save_all(node, out, lse, grad_out, grad_lse);
  auto [query, key, value, bias, distance, sinks, o, l] = below_autograd([&] {
    return double_backward().redispatch(keys & c10::after_autograd_keyset, a, out, lse, grad_out, grad_lse, query_t,
                                        key_t, value_t, bias_t, distance_t, sinks_t, grad_out_t, grad_lse_t, needed);
  });
  if (node) {
    attach(node, {query, key, value, bias, distance, sinks, o, l}, needed);
    announce(node);
  }
  return {query, key, value, bias, distance, sinks, o, l};
}

TORCH_LIBRARY_IMPL(attention_ops, Autograd, m) {
  m.impl("_attention_forward", Flat<forward_autograd>::call);
  m.impl("_attention_backward", Flat<backward_autograd>::call);
  m.impl("_attention_jvp", Flat<jvp_autograd>::call);
  m.impl("_attention_double_backward", Flat<double_backward_autograd>::call);
}

}  // namespace
}  // namespace attention_ops
