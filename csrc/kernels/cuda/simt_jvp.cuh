// Forward mode in plain arithmetic, in one pass over the tiles from lse: p = exp(s - lse) and s_dot, then
//   lse_dot = sum_j p s_dot,  out_dot = sum_j p (s_dot (v + b) + v_dot + b_dot) - lse_dot out
// with the sink in lse_dot, and dropout between p and v. A block owns 64 queries and 64 columns of the values.
#pragma once
#include "kernels/cuda/simt_backward.cuh"
#include "kernels/cuda/simt_tangents.cuh"

namespace attention_ops {

// lse_dot += p s_dot; then s := p and s_dot := p s_dot, both after dropout.
template <class T>
DEVICE void move_weights(T (&lse_dot)[4], const SimtMemory<T>& m, const Site& site, const BackwardInput& in,
                         SimtScores<T>& tile, SimtTangent<T>& dot) {
  const SimtThread t;
  const SimtDropout<T> dropped(m, tile, site.of);
  for (int r = 0; r < 4; ++r) {
    const SimtNorm<T> norm(in, site, tile.query + t.row(r));
    for (int c = 0; c < 4; ++c) {
      const bool visible = tile.sees(m, r, c);
      const T p = visible ? norm.weight(tile.s[r][c]) : T(0), moved = visible ? p * dot.s[r][c] : T(0);
      lse_dot[r] += moved;
      tile.s[r][c] = dropped(p, r, c), dot.s[r][c] = dropped(moved, r, c);
    }
  }
}

template <class T>
DEVICE void put_tangents(const Site& site, const BackwardInput& in, const Tangents& along, const ForwardResult& result,
                         Index part, Index query, const SimtValues<T>& out_dot, const T (&lse_dot)[4]) {
  const SimtThread t;
  const Rows out = site.queries_of(in.out, query), to = site.queries_of(result.out, query);
  for (int r = 0; r < 4; ++r) {
    const int row = t.row(r);
    T sum = row_sum(lse_dot[r]);
    if (query + row >= site.of.queries) continue;
    const T sink = along.sinks ? SimtNorm<T>(in, site, query + row).weight(site.template sink<T>()) : T(0);
    if (sink != 0) sum += sink * row_value<T>(along.sinks, site.h);
    if (part == 0 && t.tx == 0) put_row_value(result.lse, site.row_of(query + row), sum);
    for (int c = 0; c < 4; ++c)
      if (const Index column = part * kSimtTile + t.column(c); column < site.of.value_width)
        to.put(row, column, out_dot[r][c] - sum * out.get<T>(row, column));
  }
}

template <class T>
__global__ void __launch_bounds__(kSimtThreads, kSimtBlocks<T>)
    simt_jvp_kernel(const __grid_constant__ Problem p, const __grid_constant__ BackwardInput in,
                    const __grid_constant__ Tangents along, const __grid_constant__ ForwardResult result, Index parts,
                    Index tiles, Index tasks) {
  const SimtMemory<T> m;
  for (Index task = device::block(); task < tasks; task += device::blocks()) {
    const Index part = task % parts, query = (tiles - 1 - task / parts % tiles) * kSimtTile, bh = task / parts / tiles;
    const Site site{p, bh / p.heads, bh % p.heads};
    SimtValues<T> out_dot;
    T lse_dot[4] = {};
    clear(out_dot);
    SimtTangent<T> dot;
    each_key_tile<T>(site, query, [&](SimtScores<T>& tile) {
      dot.compute(site, along, tile);
      move_weights(lse_dot, m, site, in, tile, dot);
      add_product<false>(out_dot, m, dot.s, site.v(tile.key), part, tile.some);
      add_distances(out_dot, site, query, tile.key, p.distance, p.value_columns(), part, tile.some);
      put_weights(m, tile.s);
      if (along.v.defined())
        multiply_columns<false>(out_dot, site.keys_of(along.v, tile.key), part * kSimtTile, tile.some);
      add_distances(out_dot, site, query, tile.key, along.distance, p.value_columns(), part, tile.some);
    });
    put_tangents(site, in, along, result, part, query, out_dot, lse_dot);
  }
}

}  // namespace attention_ops
