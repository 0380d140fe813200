// The private operators that have CUDA kernels.
#pragma once
#include <torch/library.h>

#include "ops/ops.h"

namespace attention_ops {

Pair forward_cuda(const Attention& a);
Six backward_cuda(const Attention& a, In out, In lse, Opt grad_out, Opt grad_lse, std::array<bool, 6> needed);
Pair jvp_cuda(const Attention& a, In out, In lse, Opt query_t, Opt key_t, Opt value_t, Opt bias_t, Opt distance_t,
              Opt sinks_t);
Eight double_backward_cuda(const Attention& a, In out, In lse, Opt grad_out, Opt grad_lse, Opt query_t, Opt key_t,
                           Opt value_t, Opt bias_t, Opt distance_t, Opt sinks_t, Opt grad_out_t, Opt grad_lse_t,
                           std::array<bool, 8> needed);
Tensor dropout_mask_cuda(In seed, int64_t batch, int64_t heads, int64_t queries, int64_t keys, double dropout_p);
Tensor weights_cuda(const Attention& a, Opt lse, Opt heads, Opt rows, c10::SymInt queries, bool average);
Five weights_backward_cuda(const Attention& a, In lse, Opt heads, Opt rows, c10::SymInt queries, bool average,
                           In grad_weights, std::array<bool, 5> needed);
Four summaries_cuda(const Attention& a, In lse);
Five summaries_backward_cuda(const Attention& a, In lse, In argmax, Opt grad_column_sum, Opt grad_entropy,
                             Opt grad_maximum, std::array<bool, 5> needed);
Tensor weights_jvp_cuda(const Attention& a, In lse, Opt heads, Opt rows, c10::SymInt queries, bool average, Opt query_t,
                        Opt key_t, Opt bias_t, Opt distance_t, Opt lse_t);
Five weights_double_backward_cuda(const Attention& a, In lse, Opt heads, Opt rows, c10::SymInt queries, bool average,
                                  In grad_weights, Opt query_t, Opt key_t, Opt bias_t, Opt distance_t, Opt lse_t,
                                  Opt grad_weights_t, std::array<bool, 5> needed);
Three summaries_jvp_cuda(const Attention& a, In lse, In argmax, Opt query_t, Opt key_t, Opt bias_t, Opt distance_t,
                         Opt lse_t);
Five summaries_double_backward_cuda(const Attention& a, In lse, In argmax, Opt grad_column_sum, Opt grad_entropy,
                                    Opt grad_maximum, Opt query_t, Opt key_t, Opt bias_t, Opt distance_t, Opt lse_t,
                                    Opt grad_column_sum_t, Opt grad_entropy_t, Opt grad_maximum_t,
                                    std::array<bool, 5> needed);
Tensor rope_table_cuda(In positions, In inv_freq, at::IntArrayRef axes, double factor, at::ScalarType dtype);
Tensor rope_cuda(In x, In table, bool interleaved, bool inverse);

inline void register_operators(torch::Library& m) {
  m.impl("_attention_forward", Flat<forward_cuda>::call);
  m.impl("_attention_backward", Flat<backward_cuda>::call);
  m.impl("_attention_jvp", Flat<jvp_cuda>::call);
  m.impl("_attention_double_backward", Flat<double_backward_cuda>::call);
  m.impl("_dropout_mask", dropout_mask_cuda);
  m.impl("_attention_weights", Flat<weights_cuda>::call);
  m.impl("_attention_weights_backward", Flat<weights_backward_cuda>::call);
  m.impl("_attention_summaries", Flat<summaries_cuda>::call);
  m.impl("_attention_summaries_backward", Flat<summaries_backward_cuda>::call);
  m.impl("_attention_weights_jvp", Flat<weights_jvp_cuda>::call);
  m.impl("_attention_weights_double_backward", Flat<weights_double_backward_cuda>::call);
  m.impl("_attention_summaries_jvp", Flat<summaries_jvp_cuda>::call);
  m.impl("_attention_summaries_double_backward", Flat<summaries_double_backward_cuda>::call);
  m.impl("_rope_table", rope_table_cuda);
  m.impl("_rope", rope_cuda);
}

}  // namespace attention_ops
