// Shapes of attention and its gradients, with symbolic sizes.
#include <torch/library.h>

#include "ops/allocate.h"
#include "ops/ops.h"

namespace attention_ops {
namespace {

Pair forward_meta(const Attention& a) {
  const auto B = a.query.sym_size(0), H = a.query.sym_size(1), Lq = a.query.sym_size(2);
  return {empty_heads(a.query.options(), B, H, Lq, a.value.sym_size(3)),
          at::empty_symint({B, H, Lq}, a.query.options().dtype(lse_type(a.query)))};
}

Six backward_meta(const Attention& a, In, In, Opt, Opt, std::array<bool, 6> needed) {
  const auto wide = [&](size_t i, const Tensor& x) { return needed[i] ? empty_heads_like(x) : nothing(x); };
  const auto plain = [&](size_t i, Opt x) {
    return needed[i] && x ? empty_like_shape(*x) : nothing(x.value_or(a.query));
  };
  return {wide(0, a.query), wide(1, a.key),       wide(2, a.value),
          plain(3, a.bias), plain(4, a.distance), plain(5, a.sinks)};
}

Pair jvp_meta(const Attention& a, In, In, Opt, Opt, Opt, Opt, Opt, Opt) {
  return forward_meta(a);
}

Eight double_backward_meta(const Attention& a, In out, In lse, Opt grad_out, Opt grad_lse, Opt, Opt, Opt, Opt, Opt, Opt,
                           Opt, Opt, std::array<bool, 8> needed) {
  const auto [query, key, value, bias, distance, sinks] = backward_meta(
      a, out, lse, grad_out, grad_lse, {needed[0], needed[1], needed[2], needed[3], needed[4], needed[5]});
  const auto [out_t, lse_t] = forward_meta(a);
  return {query, key, value, bias, distance, sinks, needed[6] ? out_t : nothing(out), needed[7] ? lse_t : nothing(lse)};
}

TORCH_LIBRARY_IMPL(attention_ops, Meta, m) {
  m.impl("_attention_forward", Flat<forward_meta>::call);
  m.impl("_attention_backward", Flat<backward_meta>::call);
  m.impl("_attention_jvp", Flat<jvp_meta>::call);
  m.impl("_attention_double_backward", Flat<double_backward_meta>::call);
}

}  // namespace
}  // namespace attention_ops
