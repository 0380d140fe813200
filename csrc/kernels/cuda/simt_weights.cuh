// Weights w = exp(s - lse) in plain arithmetic: written out, or summed up by column and row. Along a direction both
// give their tangents instead: w_dot = w (s_dot - lse_dot).
#pragma once
#include "kernels/cuda/simt_row_norm.cuh"
#include "kernels/cuda/simt_tangents.cuh"

namespace attention_ops {

// Calls f(r, c, log2 w) for the visible places of a tile that this thread owns.
template <class T, class F>
DEVICE void each_weight(const SimtMemory<T>& m, const Site& site, const BackwardInput& in, const SimtScores<T>& tile,
                        F&& f) {
  for (int r = 0; r < 4; ++r) {
    const SimtNorm<T> norm(in, site, tile.query + SimtThread().row(r));
    for (int c = 0; c < 4; ++c)
      if (tile.sees(m, r, c)) f(r, c, norm.log2_weight(tile.s[r][c]));
  }
}

// The tangent of log w, of a visible place.
template <class T>
DEVICE T log_tangent(const SimtTangent<T>& dot, const Site& site, const Tangents& along, Index query, int r, int c) {
  return dot.s[r][c] - (along.lse ? row_value<T>(along.lse, site.row_of(query)) : T(0));
}

// Calls f(r, c, log2 w, w, w or its tangent), which is 0 where w is.
template <class T, class F>
DEVICE void each_moved(const SimtMemory<T>& m, const Site& site, const BackwardInput& in, const Still&,
                       const SimtScores<T>& tile, F&& f) {
  each_weight(m, site, in, tile, [&](int r, int c, T log2_w) {
    const T w = device::exp2(log2_w);
    f(r, c, log2_w, w, w);
  });
}
template <class T, class F>
DEVICE void each_moved(const SimtMemory<T>& m, const Site& site, const BackwardInput& in, const Tangents& along,
                       const SimtScores<T>& tile, F&& f) {
  SimtTangent<T> dot;
  dot.compute(site, along, tile);
  each_weight(m, site, in, tile, [&](int r, int c, T log2_w) {
    const T w = device::exp2(log2_w);
    f(r, c, log2_w, w, w == 0 ? w : w * log_tangent(dot, site, along, tile.query + SimtThread().row(r), r, c));
  });
}

// A block owns a tile of the result, and of a mean all heads.
template <class T, class Along>
__global__ void __launch_bounds__(kSimtThreads, kSimtBlocks<T>)
    simt_weights_kernel(const __grid_constant__ Problem p, const __grid_constant__ BackwardInput in,
                        const __grid_constant__ Along along, const __grid_constant__ Tensor4 out, bool average,
                        Index rows, Index columns, Index tasks) {
  const SimtMemory<T> m;
  const SimtThread t;
  for (Index task = device::block(); task < tasks; task += device::blocks()) {
    const Index key = task % columns * kSimtTile, query = task / columns % rows * kSimtTile;
    const Index slice = task / columns / rows, b = average ? slice : slice / p.heads;
    const Index first = average ? 0 : slice % p.heads, last = average ? p.heads : first + 1;
    SimtValues<T> w;
    clear(w);
    for (Index h = first; h < last; ++h) {
      const Site site{p, b, h};
      const Cover cover = site.cover(query, kSimtTile, key, kSimtTile);
      if (cover == Cover::none) continue;
      SimtScores<T> tile;
      tile.compute(site, query, key, cover == Cover::all);
      each_moved(m, site, in, along, tile, [&](int r, int c, T, T, T moved) { w[r][c] += moved; });
    }
    const Rows to(out, b, first, query);
    const T factor = average ? T(1) / T(p.heads) : T(1);
    for (int r = 0; r < 4; ++r)
      for (int c = 0; c < 4; ++c) to.put(t.row(r), key + t.column(c), factor * w[r][c]);
  }
}

// A weight below the normal numbers counts as 0, and 0 log 0 = 0.
template <class T>
DEVICE bool counts(T log2_w) {
  return !(log2_w < T(std::numeric_limits<T>::min_exponent - 1));
}

// The largest weight of a row and its first key; NaN is larger than any number.
template <class T>
struct Largest {
  T w = 0;
  int key = 0;

  DEVICE void take(T x, int j) {
    if (w == w && (x > w || x != x)) w = x, key = j;
  }
  // Of what another thread has seen.
  DEVICE void take(const Largest& other) {
    const bool nan = w != w, other_nan = other.w != other.w;
    const bool equal = nan ? other_nan : other.w == w;
    if (equal ? other.key < key : !nan && (other_nan || other.w > w)) *this = other;
  }
};

// A thread's part of its rows' summaries.
template <class T, class Along>
struct SimtRowSummaries {
  T w_log2_w[4] = {};
  Largest<T> largest[4];

  DEVICE void take(const Summaries&, const Site&, int r, Index, Index key, T log2_w, T w, T) {
    if (counts(log2_w)) w_log2_w[r] += w * log2_w;
    largest[r].take(w, int(key));
  }
  DEVICE void put(const Summaries& result, const Site& site, Index query) {
    const SimtThread t;
    for (int r = 0; r < 4; ++r) {
      const T sum = row_sum(w_log2_w[r]);
      for (int n = 8; n > 0; n /= 2)
        largest[r].take({device::shuffle_xor(largest[r].w, n), device::shuffle_xor(largest[r].key, n)});
      if (t.tx > 0 || query + t.row(r) >= site.of.queries) continue;
      const Index i = site.row_of(query + t.row(r));
      put_row_value(result.entropy, i, sum * -kLn2<T>);
      put_row_value(result.maximum, i, largest[r].w);
      device::store(result.argmax + i, Index(largest[r].key));
    }
  }
};

// That of -w log w is -w_dot (log w + 1).
template <class T>
struct SimtRowSummaries<T, Tangents> {
  T entropy[4] = {}, maximum[4] = {};

  DEVICE void take(const Summaries& result, const Site& site, int r, Index query, Index key, T log2_w, T, T moved) {
    if (counts(log2_w)) entropy[r] -= moved * (log2_w * kLn2<T> + T(1));
    if (device::load(result.argmax + site.row_of(query)) == key) maximum[r] += moved;
  }
  DEVICE void put(const Summaries& result, const Site& site, Index query) {
    const SimtThread t;
    for (int r = 0; r < 4; ++r) {
      const T entropy_sum = row_sum(entropy[r]), maximum_sum = row_sum(maximum[r]);
      if (t.tx > 0 || query + t.row(r) >= site.of.queries) continue;
      put_row_value(result.entropy, site.row_of(query + t.row(r)), entropy_sum);
      put_row_value(result.maximum, site.row_of(query + t.row(r)), maximum_sum);
    }
  }
};

// Entropy and maximum: a block owns 64 queries.
template <class T, class Along>
__global__ void __launch_bounds__(kSimtThreads, kSimtBlocks<T>)
    simt_row_summaries_kernel(const __grid_constant__ Problem p, const __grid_constant__ BackwardInput in,
                              const __grid_constant__ Along along, const __grid_constant__ Summaries result,
                              Index tiles, Index tasks) {
  const SimtMemory<T> m;
  const SimtThread t;
  for (Index task = device::block(); task < tasks; task += device::blocks()) {
    const Index query = (tiles - 1 - task % tiles) * kSimtTile;
    const Site site{p, task / tiles / p.heads, task / tiles % p.heads};
    SimtRowSummaries<T, Along> rows;
    each_key_tile<T>(site, query, [&](SimtScores<T>& tile) {
      each_moved(m, site, in, along, tile, [&](int r, int c, T log2_w, T w, T moved) {
        rows.take(result, site, r, query + t.row(r), tile.key + t.column(c), log2_w, w, moved);
      });
    });
    rows.put(result, site, query);
  }
}

// Adds up the columns that sixteen threads each have a part of.
template <class T>
DEVICE void put_column_sums(const SimtMemory<T>& m, const T (&sum)[4], const Summaries& result, const Site& site,
                            Index key) {
  const SimtThread t;
  device::sync_threads();
  for (int c = 0; c < 4; ++c) m.a[t.ty * m.kStride + t.column(c)] = sum[c];
  device::sync_threads();
  const int column = device::thread();
  if (column >= kSimtTile || key + column >= site.of.keys) return;
  T total = 0;
  for (int n = 0; n < kSimtThreads / 16; ++n) total += m.a[n * m.kStride + column];
  put_row_value(result.column_sum, (site.b * site.of.heads + site.h) * site.of.keys + key + column, total);
}

// Column sums: a block owns 64 keys of a query head.
template <class T, class Along>
__global__ void __launch_bounds__(kSimtThreads, kSimtBlocks<T>)
    simt_column_sums_kernel(const __grid_constant__ Problem p, const __grid_constant__ BackwardInput in,
                            const __grid_constant__ Along along, const __grid_constant__ Summaries result, Index tiles,
                            Index tasks) {
  const SimtMemory<T> m;
  for (Index task = device::block(); task < tasks; task += device::blocks()) {
    const Index key = task % tiles * kSimtTile;
    const Site site{p, task / tiles / p.heads, task / tiles % p.heads};
    T sum[4] = {};
    each_query_tile<T>(site, key, [&](SimtScores<T>& tile) {
      each_moved(m, site, in, along, tile, [&](int, int c, T, T, T moved) { sum[c] += moved; });
    });
    put_column_sums(m, sum, result, site, key);
  }
}

}  // namespace attention_ops
