// Products of a few rows with many keys, whose rows are read once, in the type they are stored in. The few rows lie
// next to each other, s[key][row], so that a vector holds lanes / R keys of R rows: R is a power of two up to the
// lanes.
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
};

// Rows that come later, which the outer caches are asked for while this tile is worked on: in the order of memory, and
// a little with each step, for the processor has few places for lines that it waits for.
class RowsAhead {
 public:
  template <class E>
  RowsAhead(const StoredRows<E>& rows, Index width)
      : row_(reinterpret_cast<const char*>(rows.data)), stride_(rows.stride * sizeof(E)), width_(width * sizeof(E)) {}

  // So many bytes more; the end of a row is a line of its own.
  void ask(Index bytes) {
    for (due_ += bytes; due_ > 0 && width_ > 0;) {
      prefetch(row_ + column_);
      const Index line = std::min<Index>(kLine, width_ - column_);
      due_ -= line, column_ += line;
      if (column_ == width_) column_ = 0, row_ += stride_;
    }
  }

 private:
  const char* row_;
  Index stride_, width_, column_ = 0, due_ = 0;
};

constexpr int kBlockKeys = std::bit_floor(unsigned(kRegisterRows * kRegisterVectors));

// Keys widened for a product, a block of them: [width / lanes, kBlockKeys, lanes]. Rows are padded with zeros.
template <class E>
void pack_keys(Wide<E>* block, StoredRows<E> k, int keys, Index width, RowsAhead& ahead) {
  using T = Wide<E>;
  constexpr int kStep = kBlockKeys * kLanes<T>;
  const Index rest = width % kElements<E>;
  const auto put = [](T* to, const E* from) {
    Vec<T> x[kWidening<E>];
    load_widened(x, from);
    for (int w = 0; w < kWidening<E>; ++w) store(to + w * kStep, x[w]);
  };
  for (int key = 0; key < keys; ++key) {
    const E *from = k.at(key, 0), *end = from + width - rest;
    T* to = block + key * kLanes<T>;
    for (; from < end; from += kElements<E>, to += kWidening<E> * kStep) {
      ahead.ask(kVectorBytes);
      put(to, from);
    }
    if (rest == 0) continue;
    E padded[kElements<E>]{};
    std::copy_n(from, rest, padded);
    ahead.ask(rest * Index(sizeof(E)));
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
                                                       StoredRows<E> v, Index column, int keys, RowsAhead& ahead) {
  using T = Wide<E>;
  constexpr int kParts = kWidening<E>;
  Accumulators<T, R, N * kParts> acc{};  // of these keys alone: one sum over all keys would drift
  const E* from = v.at(0, column);
  for (int k = 0; k < keys; ++k, from += v.stride) {
    Vec<T> row[N][kParts];
    ahead.ask(N * kVectorBytes);
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) load_widened(row[n], from + n * kElements<E>);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec<T> weight = splat(p[k * R + r]);
#pragma GCC unroll 16
      for (int n = 0; n < N * kParts; ++n) acc[r][n] = fma(weight, row[n / kParts][n % kParts], acc[r][n]);
    }
  }
  each<T, R, N * kParts>(acc, [&](Vec<T>& x, int r, int n) {
    T* to = o + r * ldo + column + n * kLanes<T>;
    store(to, fma(splat(alpha[r]), load(to), x));
  });
}

// The same for `width` columns, a multiple of kElements.
template <int R, class E>
void add_values(Wide<E>* o, const Wide<E>* alpha, const Wide<E>* p, const StoredRows<E>& v, int keys, Index width,
                RowsAhead ahead) {
  constexpr int kVectors = std::max(1, kTileRows<R> / kWidening<E>);
  each_row_tile<kVectors>(width / kElements<E>, [&](auto vectors, Index n) {
    add_columns<R, vectors>(o, width, alpha, p, v, n * kElements<E>, keys, ahead);
  });
}

}  // namespace attention_ops
