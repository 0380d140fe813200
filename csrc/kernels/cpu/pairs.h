// Products of bfloat16 rows, summed in float: out[r][:] (+)= sum_n a[r][n] b[n][:] takes the terms of the sum in pairs.
// `a` is rows as they are; `b` is a pair panel, [count / 2][lanes][2]. Packing makes panels of rows, columns and
// floats.
#pragma once
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/rows.h"

namespace attention_ops {

// Whether rows of E are multiplied in pairs, and the units in which products read them: operands are padded to these.
template <class E>
constexpr bool kPaired = std::is_same_v<E, BFloat16>;
template <class E>
constexpr int kRowUnit = kPaired<E> ? kPairRows : 1;
template <class E>
constexpr int kDepthUnit = kPaired<E> ? kPairDepth : 1;

// Keys whose scores are still in the first cache when they are weighed.
constexpr int kPairBlockKeys = 32;

// Neighbours, by their numbers, whose operands are kept until they are multiplied together.
struct Pending {
  Index first = 0;
  int count = 0;

  bool accepts(Index n, int most = kPairTiles) const { return count == 0 || (count < most && n == first + count); }
  int add(Index n) {
    if (count == 0) first = n;
    return count++;
  }
};

struct NoUnit {};

// Held while a thread multiplies.
template <class E>
using ProductUnit = std::conditional_t<kPaired<E>, MatrixUnit, NoUnit>;

template <int R, int NV>
inline void multiply_registers(float* out, Index ldo, const PiecedRows& a, const BFloat16* b, Index ldb, Index count,
                               bool add) {
  constexpr int kStep = kLanes<float>;
  Accumulators<float, R, NV> acc{};
  if (add) each<float, R, NV>(acc, [&](Vec<float>& x, int r, int v) { x = load(out + r * ldo + v * kStep); });
  for (Index n = 0; n < count; n += 2, b += ldb) {
    const BFloat16* terms = a.from_term(n);
    Pairs row[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) row[v] = load_pairs(b + v * 2 * kStep);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Pairs broadcast = splat_pair(terms + r * a.stride);
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) acc[r][v] = dot_pairs(acc[r][v], broadcast, row[v]);
    }
  }
  each<float, R, NV>(acc, [&](Vec<float>& x, int r, int v) { store(out + r * ldo + v * kStep, x); });
}

// out = a b, or out += a b; rows and count, padded to their units, are read and written.
template <bool Add>
inline void multiply_pairs(float* out, Index ldo, PiecedRows a, PaddedRows<BFloat16> b, Index rows, Index vectors,
                           Index count) {
  static_assert(2 * kPairDepth <= PiecedRows::kPiece);  // so few terms are in one piece
  const Index units = round_up(rows, kPairRows) / kPairRows;
  if (units == 0) return;  // products below read their first row before they ask
  count = round_up(count, kPairDepth);
  each_row_tile<kPairBlockVectors>(vectors, [&](auto columns, Index v) {
    float* to = out + v * kLanes<float>;
    const BFloat16* right = b.data + v * 2 * kLanes<float>;
    if constexpr (kMatrixUnit)
      if (count > 0 && count <= 2 * kPairDepth)
        return multiply_tiles_by_few<columns>(to, ldo, a.data, a.stride, right, b.stride, units, count > kPairDepth,
                                              Add);
    constexpr int kRows = kMatrixUnit ? kPairBlockRows : kTileRows<columns>;
    each_row_tile<kRows>(units, [&](auto block_rows, Index r) {
      const PiecedRows left{a.data + r * kPairRows * a.stride, a.stride, a.step};
      if constexpr (kMatrixUnit)
        multiply_tiles<block_rows, columns>(to + r * kPairRows * ldo, ldo, left, right, b.stride, count, Add);
      else
        multiply_registers<block_rows, columns>(to + r * kPairRows * ldo, ldo, left, right, b.stride, count, Add);
    });
  });
}

// The panel of rows along their columns that score products read: [columns, width] times `factor`, or as it is the pair
// panel [columns / 2, width, 2].
template <std::floating_point T>
inline void rows_to_panel(T* dst, int width, const T* src, Index stride, int rows, Index columns, T factor) {
  rows_to_lanes(dst, width, src, stride, rows, columns, factor);
}
inline void rows_to_panel(BFloat16* dst, int width, const BFloat16* src, Index stride, int rows, Index columns, float) {
  float* lanes = reinterpret_cast<float*>(dst);  // a pair moves as one number of 32 bits
  transpose_to_lanes(lanes, width, rows, (columns + 1) / 2, [&](int r, Index c, int n) {
    const BFloat16* from = src + r * stride + 2 * c;
    BFloat16 pairs[2 * kLanes<float>]{};
    if (2 * (c + kLanes<float>) <= columns) return std::bit_cast<Vec<float>>(load_pairs(from));
    std::copy_n(from, std::min<Index>(2 * n, columns - 2 * c), pairs);
    return std::bit_cast<Vec<float>>(load_pairs(pairs));
  });
  const Index written = (columns + 1) / 2 * 2;
  std::fill_n(dst + written * width, (round_up(columns, kPairDepth) - written) * width, BFloat16{});
}

// Panels for sums over rows hold finite numbers only: masked places may hold anything, and 0 times it is NaN. What is
// left out of them is added by itself, where it is seen.
template <class T, class E>
inline Vec<T> left_out(Vec<T> x) {
  if constexpr (kPaired<E>) return not_finite(x) ? x : Vec<T>{};
  return x;
}

// The pair panel of rows across them, [rows / 2, ldd, 2]: rows past `rows` and columns past `columns` are zero.
inline void interleave_rows(BFloat16* dst, Index ldd, const BFloat16* src, Index stride, Index rows, Index padded_rows,
                            Index columns) {
  for (Index r = 0; r < padded_rows; r += 2, dst += 2 * ldd)
    for (Index c = 0; c < ldd; c += kLanes<float>) {
      const int n = int(std::clamp<Index>(columns - c, 0, kLanes<float>));
      const auto row = [&](Index i) { return i < rows ? load_halves(src + i * stride + c, n) : Halves{}; };
      store_pairs(dst + 2 * c, interleave(finite_part(row(r)), finite_part(row(r + 1))));
    }
}

// Floats rounded in their places, rows first .. last of `width` lanes, and zeros in the lanes that the product's units
// add to from .. to.
inline void round_along(BFloat16* dst, Index ldd, const float* src, int width, int first, int last, int from, int to) {
  const int begin = from / kPairDepth * kPairDepth, end = int(round_up(to, kPairDepth));
  for (int k = first; k < last; ++k)
    for (int lane = begin; lane < end; lane += kLanes<float>) {
      const bool in = lane >= from && lane < to;
      write_elements(dst + k * ldd + lane, in ? load(src + k * width + lane) : Vec<float>{}, kLanes<float>);
    }
}

// The pair panel of floats across their rows, [rows / 2, width, 2], of `vectors` vectors of rows first .. last; rows
// that the product's units add are zero. Both have `width` lanes.
inline void round_across(BFloat16* dst, const float* src, int width, int first, int last, int vectors) {
  const int end = int(round_up(last, kPairDepth));
  for (int k = first / kPairDepth * kPairDepth; k < end; k += 2)
    for (int lane = 0; lane < vectors * kLanes<float>; lane += kLanes<float>) {
      const auto row = [&](int i) { return i >= first && i < last ? load(src + i * width + lane) : Vec<float>{}; };
      store_pairs(dst + k * width + 2 * lane, round_pairs(row(k), row(k + 1)));
    }
}

}  // namespace attention_ops
