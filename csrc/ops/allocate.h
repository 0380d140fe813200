// How results lie in memory, the same on every backend: it depends on shapes alone.
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

// Rows that rope has turned: attention reads each head's again and again, so they are next to each other. Turned back
// they are gradients.
inline at::Tensor empty_turned_like(const at::Tensor& x, bool inverse) {
  const auto B = x.sym_size(0), H = x.sym_size(1), L = x.sym_size(2), width = x.sym_size(3);
  return inverse ? empty_heads(x.options(), B, H, L, width) : at::empty_symint({B, H, L, width}, x.options());
}

inline at::Tensor empty_heads_like(const at::Tensor& x) {
  return empty_heads(x.options(), x.sym_size(0), x.sym_size(1), x.sym_size(2), x.sym_size(3));
}

inline at::Tensor empty_like_shape(const at::Tensor& x) {
  return at::empty_symint(x.sym_sizes(), x.options());
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
