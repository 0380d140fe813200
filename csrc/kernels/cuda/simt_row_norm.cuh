// A row's norm in plain arithmetic: p = 2^(s - base - log2_l), from lse, or, where that is too large, from the scores.
#pragma once
#include "kernels/cuda/simt_forward.cuh"

namespace attention_ops {

// lse gives p at once, unless it is so large that its last digit would show in p.
template <class T>
DEVICE bool is_coarse(T lse) {
  return lse > 1024 ? lse < kInfinity<T> : lse < -1024 && lse > -kInfinity<T>;
}

// What turns a row's scores into weights.
template <class T>
struct SimtNorm {
  T base = 0, log2_l = 0;

  // Rows past the last have no visible place.
  DEVICE SimtNorm(const BackwardInput& in, const Site& site, Index query) {
    if (query >= site.of.queries) return;
    base = row_value<T>(in.base, site.row_of(query)), log2_l = row_value<T>(in.log2_l, site.row_of(query));
  }
  DEVICE T log2_weight(T s) const { return s - base - log2_l; }
  DEVICE T weight(T s) const { return device::exp2(log2_weight(s)); }
};

// base = lse and log2_l = 0, or, where lse is coarse, both counted again from the scores.
template <class T>
DEVICE void find_norm(const SimtMemory<T>& m, const Site& site, const BackwardInput& in, Index query) {
  const Problem& p = site.of;
  const SimtThread t;
  const int lane = device::thread() % 32;
  bool mine = false;
  for (int row = lane; row < kSimtTile; row += 32)
    if (query + row < p.queries) mine = mine || is_coarse(row_value<T>(in.lse, site.row_of(query + row)));
  const bool coarse = device::ballot(mine) != 0;
  SimtRows<T> rows(site.sink<T>());
  if (coarse)
    each_key_tile<T>(site, query, [&](SimtScores<T>& tile) {
      for (int r = 0; r < 4; ++r) rows.update(tile.s[r], r);
    });
  if (coarse && in.inexact && device::thread() == 0) device::raise(in.inexact);
  for (int r = 0; r < 4; ++r) {
    const T l = row_sum(rows.l[r]);
    if (t.tx > 0 || query + t.row(r) >= p.queries) continue;
    const Index i = site.row_of(query + t.row(r));
    const T lse = row_value<T>(in.lse, i), from_lse = lse == -kInfinity<T> ? T(0) : lse * kLog2e<T>;
    put_row_value(in.base, i, !is_coarse(lse) ? from_lse : rows.m[r] == -kInfinity<T> ? T(0) : rows.m[r]);
    put_row_value(in.log2_l, i, !is_coarse(lse) || l == 0 ? T(0) : device::log2(l));
  }
}

}  // namespace attention_ops
