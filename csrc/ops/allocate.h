// How results lie in memory, the same on every backend: it depends on shapes alone, and on which way rope turns.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

namespace attention_ops {

// out and the gradients of query, key and value: [B, H, L, width] whose heads lie next to each other, as a projection
// back to the model's width wants them.
inline at::Tensor empty_heads(const at::TensorOptions& options, const c10::SymInt& B, const c10::SymInt& H,
                              const c10::SymInt& L, const c10::SymInt& width) {
  return at::empty_strided_symint({B, H, L, width}, {L * H * width, width, H * width, 1}, options);
}

inline at::Tensor empty_heads_like(const at::Tensor& x) {
  return empty_heads(x.options(), x.sym_size(0), x.sym_size(1), x.sym_size(2), x.sym_size(3));
}

inline at::Tensor empty_like_shape(const at::Tensor& x) {
  return at::empty_symint(x.sym_sizes(), x.options());
}

// Of rope. Attention reads each head's rows again and again, so they lie next to each other; turned back they are
// gradients.
inline at::Tensor empty_turned_like(const at::Tensor& x, bool inverse) {
  return inverse ? empty_heads_like(x) : empty_like_shape(x);
}

// Stands for a gradient that was not asked for.
inline at::Tensor nothing(const at::Tensor& like) {
  return at::empty({0}, like.options());
}

// Half types keep lse and the summaries in float32.
inline at::ScalarType lse_type(const at::Tensor& query) {
  return query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace attention_ops
