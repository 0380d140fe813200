// Products of a few rows with many keys, which are read once, in the type they are stored in. The rows of a tile lie
// next to each other, s[key][row], so that a vector holds lanes / R keys of R rows: R is a power of two up to the lanes.
#pragma once
#include "kernels/cpu/gemm.h"

namespace attention_ops {

// Rows of keys or values, and those that will be read next: the places beside those read now are fetched meanwhile.
template <class E>
struct StoredRows {
  const E* data;
  Index stride;
  const E* next;
  Index next_stride;
};

// acc[key][row] += q[row] k[key] for one vector of columns
template <class T, int R, int Keys>
inline __attribute__((always_inline)) void add_dots(Vec<T>* acc, const T* q, Index ldq, const Vec<T> (&k)[Keys]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const Vec<T> row = load(q + r * ldq);
#pragma GCC unroll 16
    for (int n = 0; n < Keys; ++n) acc[n * R + r] = fma(row, k[n], acc[n * R + r]);
  }
}

// acc[key][row] += q[row] k[key], each lane the sum over its own columns, for the keys from `key` on; those past the
// last one repeat it.
template <class T, int R, int Keys, class E>
inline __attribute__((always_inline)) void multiply_keys(Vec<T>* acc, const T* q, Index ldq, const StoredRows<E>& k,
                                                         int key, int keys, Index width) {
  Vec<T> x[Keys];
  const E* rows[Keys];
#pragma GCC unroll 16
  for (int n = 0; n < Keys; ++n) rows[n] = k.data + std::min(key + n, keys - 1) * k.stride;
  const E* next = k.next + key * k.next_stride;
  Index d = 0;
  for (; d + kLanes<T> <= width; d += kLanes<T>) {
#pragma GCC unroll 16
    for (int n = 0; n < Keys; ++n) {
      x[n] = load_widened(rows[n] + d);
      __builtin_prefetch(next + n * k.next_stride + d);
    }
    add_dots<T, R, Keys>(acc, q + d, ldq, x);
  }
  if (d == width) return;
#pragma GCC unroll 16
  for (int n = 0; n < Keys; ++n) x[n] = load_widened_part(rows[n] + d, int(width - d));
  add_dots<T, R, Keys>(acc, q + d, ldq, x);
}

// s[key][row] = q[row] k[key]; q is padded with zeros to whole vectors, s is written in whole vectors.
template <class T, int R, class E>
void multiply_queries(T* s, const T* q, Index ldq, const StoredRows<E>& k, int keys, Index width) {
  constexpr int kKeys = kLanes<T> / R, kAtOnce = std::min(kKeys, 4);
  for (int key = 0; key < keys; key += kKeys) {
    Vec<T> acc[kLanes<T>]{};
#pragma GCC unroll 16
    for (int n = 0; n < kKeys; n += kAtOnce)
      multiply_keys<T, R, kAtOnce>(acc + n * R, q, ldq, k, key + n, keys, width);
    store(s + key * R, sum_each<T>(acc));
  }
}

// o[row] = alpha[row] o[row] + sum over the keys of p[key][row] v[key], in NV vectors of columns; `part`: of the only
// one, so many columns.
template <class T, int R, int NV, bool Part, class E>
inline __attribute__((always_inline)) void add_columns(T* o, Index ldo, const T* alpha, const T* p,
                                                       const StoredRows<E>& v, Index column, int keys, int part) {
  Accumulators<T, R, NV> acc;
  each<T, R, NV>(acc, [&](Vec<T>& x, int r, int n) {
    x = splat(alpha[r]) * load(o + r * ldo + column + n * kLanes<T>);
  });
  for (int k = 0; k < keys; ++k) {
    Vec<T> row[NV];
#pragma GCC unroll 16
    for (int n = 0; n < NV; ++n) {
      const E* from = v.data + k * v.stride + column + n * kLanes<T>;
      row[n] = Part ? load_widened_part(from, part) : load_widened(from);
      __builtin_prefetch(v.next + k * v.next_stride + column + n * kLanes<T>);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec<T> weight = splat(p[k * R + r]);
#pragma GCC unroll 16
      for (int n = 0; n < NV; ++n) acc[r][n] = fma(weight, row[n], acc[r][n]);
    }
  }
  each<T, R, NV>(acc, [&](Vec<T>& x, int r, int n) { store(o + r * ldo + column + n * kLanes<T>, x); });
}

// The same for all columns; o is padded to whole vectors.
template <class T, int R, class E>
void add_values(T* o, Index ldo, const T* alpha, const T* p, const StoredRows<E>& v, int keys, Index width) {
  constexpr int kVectors = std::max(1, kTileRows<kForwardRows, kForwardVectors, R>);
  const Index whole = width / kLanes<T>;
  each_row_tile<kVectors>(whole, [&](auto vectors, Index n) {
    add_columns<T, R, vectors, false>(o, ldo, alpha, p, v, n * kLanes<T>, keys, 0);
  });
  if (const int part = int(width % kLanes<T>))
    add_columns<T, R, 1, true>(o, ldo, alpha, p, v, whole * kLanes<T>, keys, part);
}

}  // namespace attention_ops
