// Every private operator on one page: the shared arguments, the signatures, and how to call each.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>

namespace attention_ops {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using In = const Tensor&;
using Opt = const OptionalTensor&;
using Pair = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Five = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using Six = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using Eight = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// The arguments that every attention primitive starts with, checked and normalised. Borrows: it lives for one call.
struct Attention {
  const Tensor& query;         // [B, H, Lq, D]
  const Tensor& key;           // [B, Hkv, Lk, D]
  const Tensor& value;         // [B, Hkv, Lk, Dv]
  const OptionalTensor& bias;  // [B|1, H|1, Lq|1, Lk|1]
  // What depends on the distance alone, row j - i + Lq - 1 of [B|1, H|1, Lq + Lk - 1, 1 or 1 + D or 1 + D + Dv]: a
  // bias, then what is added to a key, then what is added to a value.
  const OptionalTensor& distance;
  const OptionalTensor& sinks;  // [H]
  at::TensorList mask_data;     // each kind of `mask` takes its tensors in turn; axis 0 is the batch, B or 1
  std::string_view mask;        // "causal & padding"; empty: every key is visible
  double scale;
  double softcap;  // 0: none
  double dropout_p;
  const OptionalTensor& seed;  // int64: [1] is a seed, [B, 2] is a seed and a batch number for each row

  Attention with_rows(In other_query, In other_key) const {
    return {other_query, other_key, value, bias, distance, sinks, mask_data, mask, scale, softcap, dropout_p, seed};
  }
};

inline constexpr const char* kSharedSchema =
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? distance, Tensor? sinks, Tensor[] mask_data, str "
    "mask, "
    "float scale, float softcap, float dropout_p, Tensor? seed";

// Adapts a kernel that takes (Attention, extra...) to the flat argument list of the schema.
template <auto Kernel>
struct Flat;

template <class Return, class... Extra, Return (*Kernel)(const Attention&, Extra...)>
struct Flat<Kernel> {
  static Return call(In query, In key, In value, Opt bias, Opt distance, Opt sinks, at::TensorList mask_data,
                     std::string_view mask, double scale, double softcap, double dropout_p, Opt seed, Extra... extra) {
    return Kernel({query, key, value, bias, distance, sinks, mask_data, mask, scale, softcap, dropout_p, seed},
                  extra...);
  }
};

template <class Return, class... Extra, Return (*Kernel)(c10::DispatchKeySet, const Attention&, Extra...)>
struct Flat<Kernel> {
  static Return call(c10::DispatchKeySet keys, In query, In key, In value, Opt bias, Opt distance, Opt sinks,
                     at::TensorList mask_data, std::string_view mask, double scale, double softcap, double dropout_p,
                     Opt seed, Extra... extra) {
    return Kernel(keys, {query, key, value, bias, distance, sinks, mask_data, mask, scale, softcap, dropout_p, seed},
                  extra...);
  }
};

// A primitive found once in the dispatcher. `call` starts a dispatch, `redispatch` continues one below `keys`.
template <class Return, class... Extra>
class Primitive {
 public:
  explicit Primitive(const char* name)
      : handle_(c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>()) {}

  Return call(const Attention& a, Extra... extra) const {
    return handle_.call(a.query, a.key, a.value, a.bias, a.distance, a.sinks, a.mask_data, a.mask, a.scale, a.softcap,
                        a.dropout_p, a.seed, extra...);
  }

  Return redispatch(c10::DispatchKeySet keys, const Attention& a, Extra... extra) const {
    return handle_.redispatch(keys, a.query, a.key, a.value, a.bias, a.distance, a.sinks, a.mask_data, a.mask, a.scale,
                              a.softcap, a.dropout_p, a.seed, extra...);
  }

 private:
  using Signature = Return(In, In, In, Opt, Opt, Opt, at::TensorList, std::string_view, double, double, double, Opt,
                           Extra...);
  c10::TypedOperatorHandle<Signature> handle_;
};

// (out [B, H, Lq, Dv], lse [B, H, Lq])
inline const auto& forward() {
  static const Primitive<Pair> op("attention_ops::_attention_forward");
  return op;
}

// (grad_query, grad_key, grad_value, grad_bias, grad_distance, grad_sinks) from out, lse, grad_out, grad_lse, which are
// needed; one that is not needed is empty [0]. out and lse are caches of the forward, not inputs of their own.
inline const auto& backward() {
  static const Primitive<Six, In, In, Opt, Opt, std::array<bool, 6>> op("attention_ops::_attention_backward");
  return op;
}

// (out_t, lse_t), the tangents of forward, from out, lse and the tangents of query, key, value, bias, distance, sinks
inline const auto& jvp() {
  static const Primitive<Pair, In, In, Opt, Opt, Opt, Opt, Opt, Opt> op("attention_ops::_attention_jvp");
  return op;
}

// The tangents of backward and forward together, (grad_query_t, grad_key_t, grad_value_t, grad_bias_t, grad_distance_t,
// grad_sinks_t, out_t, lse_t), from out, lse, grad_out, grad_lse, the tangents of query, key, value, bias, distance,
// sinks, grad_out, grad_lse, and which are needed. Second derivatives are symmetric: it is the gradient of `backward`
// and of `jvp` too.
inline const auto& double_backward() {
  static const Primitive<Eight, In, In, Opt, Opt, Opt, Opt, Opt, Opt, Opt, Opt, Opt, Opt, std::array<bool, 8>> op(
      "attention_ops::_attention_double_backward");
  return op;
}

// exp(s - lse) [B, H, Lq, Lk], or its mean over the heads [B, Lq, Lk], from lse, heads, rows, queries, average.
// Value has width 0. Sinks act through lse, a differentiable input, and have no gradient of their own. Without lse the
// kernel normalises the rows itself, sinks included, and there are no derivatives. Where only some heads or rows are
// wanted, query, key, bias and lse hold those; heads [H] and rows [Lq] say which they are, and `queries` how many rows
// there would be in all: the mask needs them, and its data stays whole.
inline const auto& weights() {
  static const Primitive<Tensor, Opt, Opt, Opt, c10::SymInt, bool> op("attention_ops::_attention_weights");
  return op;
}

// (grad_query, grad_key, grad_bias, grad_distance, grad_lse) from lse, heads, rows, queries, average, grad_weights,
// which are needed
inline const auto& weights_backward() {
  static const Primitive<Five, In, Opt, Opt, c10::SymInt, bool, In, std::array<bool, 5>> op(
      "attention_ops::_attention_weights_backward");
  return op;
}

// weights_t, the tangent of weights, from what it takes and the tangents of query, key, bias, distance, lse
inline const auto& weights_jvp() {
  static const Primitive<Tensor, In, Opt, Opt, c10::SymInt, bool, Opt, Opt, Opt, Opt, Opt> op(
      "attention_ops::_attention_weights_jvp");
  return op;
}

// The tangent of weights_backward, (grad_query_t, grad_key_t, grad_bias_t, grad_distance_t, grad_lse_t), from what it
// takes, the tangents of query, key, bias, distance, lse, grad_weights, and which are needed
inline const auto& weights_double_backward() {
  static const Primitive<Five, In, Opt, Opt, c10::SymInt, bool, In, Opt, Opt, Opt, Opt, Opt, Opt, std::array<bool, 5>>
      op("attention_ops::_attention_weights_double_backward");
  return op;
}

// (column_sum [B, H, Lk], entropy [B, H, Lq], maximum [B, H, Lq], argmax [B, H, Lq]) of the weights, from lse
inline const auto& summaries() {
  static const Primitive<Four, In> op("attention_ops::_attention_summaries");
  return op;
}

// (grad_query, grad_key, grad_bias, grad_distance, grad_lse) from lse, argmax, grad_column_sum, grad_entropy,
// grad_maximum, which are needed
inline const auto& summaries_backward() {
  static const Primitive<Five, In, In, Opt, Opt, Opt, std::array<bool, 5>> op(
      "attention_ops::_attention_summaries_backward");
  return op;
}

// (column_sum_t, entropy_t, maximum_t), the tangents of summaries, from lse, argmax and the tangents of query, key,
// bias, lse
inline const auto& summaries_jvp() {
  static const Primitive<Three, In, In, Opt, Opt, Opt, Opt, Opt> op("attention_ops::_attention_summaries_jvp");
  return op;
}

// The tangents of summaries_backward from what it takes, the tangents of query, key, bias, distance, lse,
// grad_column_sum, grad_entropy, grad_maximum, and which are needed
inline const auto& summaries_double_backward() {
  static const Primitive<Five, In, In, Opt, Opt, Opt, Opt, Opt, Opt, Opt, Opt, Opt, Opt, Opt, std::array<bool, 5>> op(
      "attention_ops::_attention_summaries_double_backward");
  return op;
}

// Which weights dropout keeps, bool [B, H, Lq, Lk], from seed, B, H, Lq, Lk, dropout_p. No attention among its
// arguments.
inline Tensor kept(In seed, c10::SymInt B, c10::SymInt H, c10::SymInt Lq, c10::SymInt Lk, double dropout_p) {
  using Signature = Tensor(In, c10::SymInt, c10::SymInt, c10::SymInt, c10::SymInt, double);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("attention_ops::_dropout_mask", "").typed<Signature>();
  return op.call(seed, B, H, Lq, Lk, dropout_p);
}

// Cosines and sines [B|1, L, 2, pairs], times a factor, of positions [B|1, axes, L] times inv_freq [pairs], both
// float64; axes [pairs] says which axis each pair is on, and is empty where all are on the first. In float64 or
// float32.
inline const auto& rope_table() {
  using Signature = Tensor(In positions, In inv_freq, at::IntArrayRef axes, double factor, at::ScalarType dtype);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("attention_ops::_rope_table", "").typed<Signature>();
  return op;
}

// x [B, H, L, D] with its first 2 * pairs elements turned by such a table.
inline const auto& rope() {
  using Signature = Tensor(In x, In table, bool interleaved, bool inverse);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("attention_ops::_rope", "").typed<Signature>();
  return op;
}

// forward and backward with query and key turned by a table of the keys, of which the queries have the last rows.
// Turned rows are made anew for each and not kept.
inline const auto& rotary_forward() {
  static const Primitive<Pair, In, bool> op("attention_ops::_rotary_attention_forward");
  return op;
}
inline const auto& rotary_backward() {
  static const Primitive<Six, In, bool, In, In, Opt, Opt, std::array<bool, 6>> op(
      "attention_ops::_rotary_attention_backward");
  return op;
}

}  // namespace attention_ops
