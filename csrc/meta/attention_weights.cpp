// Shapes of the weights, their summaries and their gradients, with symbolic sizes.
#include <torch/library.h>

#include "ops/allocate.h"
#include "ops/ops.h"

namespace attention_ops {
namespace {

Tensor weights_meta(const Attention& a, Opt, Opt, Opt, c10::SymInt, bool average) {
  const auto B = a.query.sym_size(0), H = a.query.sym_size(1), Lq = a.query.sym_size(2), Lk = a.key.sym_size(2);
  return average ? at::empty_symint({B, Lq, Lk}, a.query.options())
                 : at::empty_symint({B, H, Lq, Lk}, a.query.options());
}

Five grads(const Attention& a, In lse, std::array<bool, 5> needed) {
  return {needed[0] ? empty_heads_like(a.query) : nothing(a.query),
          needed[1] ? empty_heads_like(a.key) : nothing(a.key),
          needed[2] && a.bias ? empty_like_shape(*a.bias) : nothing(a.bias.value_or(a.query)),
          needed[3] && a.distance ? empty_like_shape(*a.distance) : nothing(a.distance.value_or(a.query)),
          needed[4] ? empty_like_shape(lse) : nothing(lse)};
}

Five weights_backward_meta(const Attention& a, In lse, Opt, Opt, c10::SymInt, bool, In, std::array<bool, 5> needed) {
  return grads(a, lse, needed);
}

Four summaries_meta(const Attention& a, In lse) {
  const auto B = a.query.sym_size(0), H = a.query.sym_size(1), Lk = a.key.sym_size(2);
  return {at::empty_symint({B, H, Lk}, lse.options()), empty_like_shape(lse), empty_like_shape(lse),
          at::empty_symint(lse.sym_sizes(), lse.options().dtype(at::kLong))};
}

Five summaries_backward_meta(const Attention& a, In lse, In, Opt, Opt, Opt, std::array<bool, 5> needed) {
  return grads(a, lse, needed);
}

Tensor weights_jvp_meta(const Attention& a, In lse, Opt heads, Opt rows, c10::SymInt queries, bool average, Opt, Opt,
                        Opt, Opt, Opt) {
  return weights_meta(a, lse, heads, rows, queries, average);
}

Five weights_double_backward_meta(const Attention& a, In lse, Opt, Opt, c10::SymInt, bool, In, Opt, Opt, Opt, Opt, Opt,
                                  Opt, std::array<bool, 5> needed) {
  return grads(a, lse, needed);
}

Three summaries_jvp_meta(const Attention& a, In lse, In, Opt, Opt, Opt, Opt, Opt) {
  const auto [column_sum, entropy, maximum, argmax] = summaries_meta(a, lse);
  return {column_sum, entropy, maximum};
}

Five summaries_double_backward_meta(const Attention& a, In lse, In, Opt, Opt, Opt, Opt, Opt, Opt, Opt, Opt, Opt, Opt,
                                    Opt, std::array<bool, 5> needed) {
  return grads(a, lse, needed);
}

TORCH_LIBRARY_IMPL(attention_ops, Meta, m) {
  m.impl("_attention_weights", Flat<weights_meta>::call);
  m.impl("_attention_weights_backward", Flat<weights_backward_meta>::call);
  m.impl("_attention_summaries", Flat<summaries_meta>::call);
  m.impl("_attention_summaries_backward", Flat<summaries_backward_meta>::call);
  m.impl("_attention_weights_jvp", Flat<weights_jvp_meta>::call);
  m.impl("_attention_weights_double_backward", Flat<weights_double_backward_meta>::call);
  m.impl("_attention_summaries_jvp", Flat<summaries_jvp_meta>::call);
  m.impl("_attention_summaries_double_backward", Flat<summaries_double_backward_meta>::call);
}

}  // namespace
}  // namespace attention_ops
