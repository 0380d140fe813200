// Products of a few rows with many keys, whose rows are read once, in the type they are stored in. The few rows lie next
// to each other, s[key][row], so that a vector holds lanes / R keys of R rows: R is a power of two up to the lanes.
#pragma once
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/problem.h"

namespace attention_ops {

// Rows of a tensor, columns contiguous.
template <class E>
struct StoredRows {
  const E* data;
  Index stride;

  const E* at(Index row, Index column) const { return data + row * stride + column; }
  // Asks the outer cache for the same place of the next tile, which is read when this one is done with.
  void fetch_next(Index row, Index column) const { __builtin_prefetch(at(row + kTileKeys, column), 0, 2); }
};

constexpr int kBlockKeys = std::bit_floor(unsigned(kForwardRows * kForwardVectors));

// Keys widened for a product, a block of them: [width / lanes, kBlockKeys, lanes]. Rows are padded with zeros.
template <class E>
void pack_keys(Wide<E>* block, StoredRows<E> k, int keys, Index width) {
  using T = Wide<E>;
  constexpr int kStep = kBlockKeys * kLanes<T>;
  const Index rest = width % kElements<E>;
  const auto put = [](T* to, const E* from) {
    Vec<T> x[kWidening<E>];
    load_widened(x, from);
    for (int w = 0; w < kWidening<E>; ++w) store(to + w * kStep, x[w]);
  };
  for (int key = 0; key < keys; ++key) {
    T* to = block + key * kLanes<T>;
    for (Index d = 0; d < width - rest; d += kElements<E>, to += kWidening<E> * kStep) {
      k.fetch_next(key, d);
      put(to, k.at(key, d));
    }
    if (rest == 0) continue;
    E padded[kElements<E>]{};
    std::copy_n(k.at(key, width - rest), rest, padded);
    put(to, padded);
  }
}

// s[key][row] = q[row] k[key] for a block of keys. q: [width / lanes, R, R, lanes / R], the columns of each row in R
// groups of lanes / R.
template <int R, class T>
void multiply_queries(T* s, const T* q, const T* block, Index vectors) {
  constexpr int kStep = kLanes<T>, kGroup = kStep / R;
  Vec<T> acc[kBlockKeys]{};
  for (Index n = 0; n < vectors; ++n, block += kBlockKeys * kStep)
    for (int group = 0; group < R; ++group, q += kStep) {
      const Vec<T> rows = load(q);
#pragma GCC unroll 16
      for (int key = 0; key < kBlockKeys; ++key)
        acc[key] = fma(repeat<T, kGroup>(block + key * kStep + group * kGroup), rows, acc[key]);
    }
#pragma GCC unroll 16
  for (int key = 0; key < kBlockKeys; key += kGroup) store(s + key * R, add_groups<T, kGroup>(acc + key));
}

// o[row] = alpha[row] o[row] + sum over the keys of p[key][row] v[key] in N vectors' worth of columns.
template <int R, int N, class E>
inline __attribute__((always_inline)) void add_columns(Wide<E>* o, Index ldo, const Wide<E>* alpha, const Wide<E>* p,
                                                       StoredRows<E> v, Index column, int keys) {
  using T = Wide<E>;
  constexpr int kParts = kWidening<E>;
  Accumulators<T, R, N * kParts> acc;
  each<T, R, N * kParts>(acc, [&](Vec<T>& x, int r, int n) {
    x = splat(alpha[r]) * load(o + r * ldo + column + n * kLanes<T>);
  });
  for (int k = 0; k < keys; ++k) {
    Vec<T> row[N][kParts];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      load_widened(row[n], v.at(k, column + n * kElements<E>));
      v.fetch_next(k, column + n * kElements<E>);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec<T> weight = splat(p[k * R + r]);
#pragma GCC unroll 16
      for (int n = 0; n < N * kParts; ++n) acc[r][n] = fma(weight, row[n / kParts][n % kParts], acc[r][n]);
    }
  }
  each<T, R, N * kParts>(acc, [&](Vec<T>& x, int r, int n) { store(o + r * ldo + column + n * kLanes<T>, x); });
}

// The same for `width` columns, a multiple of kElements.
template <int R, class E>
void add_values(Wide<E>* o, const Wide<E>* alpha, const Wide<E>* p, const StoredRows<E>& v, int keys, Index width) {
  constexpr int kVectors = std::max(1, kTileRows<kForwardRows, kForwardVectors, R> / kWidening<E>);
  each_row_tile<kVectors>(width / kElements<E>, [&](auto vectors, Index n) {
    add_columns<R, vectors>(o, width, alpha, p, v, n * kElements<E>, keys);
  });
}

}  // namespace attention_ops
