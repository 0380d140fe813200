// Register-blocked products: R rows by NV vectors of accumulators, one operand broadcast, the other in vectors.
#pragma once
#include <algorithm>
#include <bit>
#include <type_traits>

#include "kernels/cpu/vec.h"
#include "kernels/view.h"

namespace attention_ops {

// Rows of the register tile beside NV vectors: narrow tiles are taller, for enough independent sums to hide the latency
// of one.
template <int NV>
constexpr int kTileRows = std::bit_floor(unsigned(kRegisterRows * kRegisterVectors / NV));

template <class T, int R, int NV>
using Accumulators = Vec<T>[R][NV];

template <class T, int R, int NV, class F>
inline __attribute__((always_inline)) void each(Accumulators<T, R, NV>& acc, F&& f) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) f(acc[r][v], r, v);
}

// acc[r] += a[r * step] b
template <class T, int R, int NV>
inline __attribute__((always_inline)) void outer(Accumulators<T, R, NV>& acc, const T* a, Index step, const T* b) {
  Vec<T> row[NV];
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) row[v] = load(b + v * kLanes<T>);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const Vec<T> broadcast = splat(a[r * step]);
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) acc[r][v] = fma(broadcast, row[v], acc[r][v]);
  }
}

// acc[r][:] += sum_n a[r][n] b[n][:], a with `lda` between rows
template <class T, int R, int NV>
inline __attribute__((always_inline)) void multiply_rows(Accumulators<T, R, NV>& acc, const T* a, Index lda, const T* b,
                                                         Index ldb, Index count) {
  Index n = 0;
  for (; n + 4 <= count; n += 4)
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) outer<T, R, NV>(acc, a + n + u, lda, b + (n + u) * ldb);
  for (; n < count; ++n) outer<T, R, NV>(acc, a + n, lda, b + n * ldb);
}

// acc[r][:] += sum_n a[n][r] b[n][:], a with `lda` between the terms of the sum
template <class T, int R, int NV>
inline __attribute__((always_inline)) void multiply_columns(Accumulators<T, R, NV>& acc, const T* a, Index lda,
                                                            const T* b, Index ldb, Index count) {
  Index n = 0;
  for (; n + 4 <= count; n += 4)
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) outer<T, R, NV>(acc, a + (n + u) * lda, 1, b + (n + u) * ldb);
  for (; n < count; ++n) outer<T, R, NV>(acc, a + n * lda, 1, b + n * ldb);
}

// Calls f(R, first row) for tiles of at most `Rows` rows that fill 0 .. count.
template <int Rows, class F>
inline __attribute__((always_inline)) void each_row_tile(Index count, F&& f) {
  Index r = 0;
  for (; r + Rows <= count; r += Rows) f(std::integral_constant<int, Rows>(), r);
  if constexpr (Rows > 1)
    if (r < count) each_row_tile<Rows / 2>(count - r, [&](auto rows, Index first) { f(rows, r + first); });
}

// Calls f(n as a constant), 1 <= n <= Most.
template <int Most, class F>
inline __attribute__((always_inline)) void with_count(int n, F&& f) {
  if constexpr (Most > 1) {
    if (n < Most) return with_count<Most - 1>(n, f);
  }
  f(std::integral_constant<int, Most>());
}

// out[r][:] = start[r][:] + sum_n a[r][n] b[n][:] for NV vectors of columns; without `start` from zero.
template <int NV, class T>
inline __attribute__((always_inline)) void multiply_rows_into(T* out, Index ldo, const T* start, const T* a, Index lda,
                                                              const T* b, Index ldb, Index rows, Index count) {
  each_row_tile<kTileRows<NV>>(rows, [&](auto tile_rows, Index r) {
    Accumulators<T, tile_rows, NV> acc{};
    if (start)
      each<T, tile_rows, NV>(acc, [&](Vec<T>& x, int i, int v) { x = load(start + (r + i) * ldo + v * kLanes<T>); });
    multiply_rows<T, tile_rows, NV>(acc, a + r * lda, lda, b, ldb, count);
    each<T, tile_rows, NV>(acc, [&](Vec<T>& x, int i, int v) { store(out + (r + i) * ldo + v * kLanes<T>, x); });
  });
}

}  // namespace attention_ops
