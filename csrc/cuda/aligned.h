// What tensor cores want of half types: rows that start at sixteen bytes. Other rows are copied and filled up with
// zeros, which change no product.
#pragma once
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "ops/allocate.h"
#include "ops/ops.h"

namespace attention_ops {

constexpr int64_t kAlignedElements = 8, kWidestRow = 256;

// Whether rows by distance stand beside keys or values: tensor cores and decoding know of a bias by distance alone.
inline bool has_rows_by_distance(const Attention& a) {
  return a.distance && a.distance->size(3) > 1;
}

// Empty problems have nothing to multiply. A block on tensor cores takes one tile, of 64 rows or more, so there must
// not be more of them than a grid has blocks.
inline bool on_tensor_cores(const Attention& a) {
  const auto fits = [](int64_t width) { return width > 0 && width <= kWidestRow; };
  const bool empty = a.query.size(2) == 0 || a.key.size(2) == 0;
  const int64_t tiles = a.query.size(0) * a.query.size(1) * (std::max(a.query.size(2), a.key.size(2)) / 64 + 1);
  return a.query.element_size() == 2 && !empty && tiles < (int64_t(1) << 31) && !has_rows_by_distance(a) &&
         fits(a.query.size(3)) && fits(a.value.size(3));
}

inline bool is_aligned(const Tensor& x) {
  bool multiples = x.size(3) % kAlignedElements == 0 && (x.size(3) == 1 || x.stride(3) == 1);
  for (int d = 0; d < 3; ++d) multiples = multiples && (x.size(d) == 1 || x.stride(d) % kAlignedElements == 0);
  return multiples && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
}

inline int64_t aligned_width(const Tensor& x) {
  return (x.size(3) + kAlignedElements - 1) / kAlignedElements * kAlignedElements;
}

inline Tensor aligned(const Tensor& x) {
  if (is_aligned(x)) return x;
  const Tensor wide = at::zeros({x.size(0), x.size(1), x.size(2), aligned_width(x)}, x.options());
  wide.narrow(3, 0, x.size(3)).copy_(x);
  return wide;
}

// A result of x's shape with room to fill up its rows, and that result without what fills them.
inline Tensor empty_aligned(const Tensor& x, bool wide) {
  return wide ? empty_heads(x.options(), x.size(0), x.size(1), x.size(2), aligned_width(x)) : empty_heads_like(x);
}
inline Tensor without_filling(const Tensor& x, int64_t width) {
  if (x.size(3) == width) return x;
  const Tensor narrow = empty_heads(x.options(), x.size(0), x.size(1), x.size(2), width);
  narrow.copy_(x.narrow(3, 0, width));
  return narrow;
}

}  // namespace attention_ops
