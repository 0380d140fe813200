// How scores move when the inputs move along their tangents. A dot marks a tangent:
//   x_dot = scale (q_dot (k + a)' + q (k_dot + a_dot)'),  s_dot = softcap'(x) x_dot + bias_dot + r_dot
#pragma once
#include "kernels/cuda/simt_tile.cuh"

namespace attention_ops {

// Of a tile whose scores are known, not in log2 units. Unlike scores they are linear: a hidden place may hold anything,
// and who reads it must leave it out.
template <class T>
struct SimtTangent {
  SimtValues<T> s, x;  // x is divided by the softcap, where there is one

  DEVICE_APART void compute(const Site& site, const Tangents& along, const SimtScores<T>& tile) {
    const SimtMemory<T> m;
    const Problem& p = site.of;
    const SimtThread t;
    clear(x);
    if (along.q.defined()) multiply_rows(x, site.queries_of(along.q, tile.query), site.k(tile.key), p.width);
    if (along.k.defined()) multiply_rows(x, site.q(tile.query), site.keys_of(along.k, tile.key), p.width);
    multiply_distances(x, site, tile.query, tile.key, along.q, p.distance, p.key_columns());
    multiply_distances(x, site, tile.query, tile.key, p.q, along.distance, p.key_columns());
    const T factor = T(p.product_scale), unit = T(p.softcap > 0 ? p.softcap : 1);
    for (int r = 0; r < 4; ++r)
      for (int c = 0; c < 4; ++c) {
        x[r][c] *= factor;
        s[r][c] = unit * x[r][c] * tile.slope(r, c);
        if (!tile.sees(m, r, c)) continue;
        const Index i = tile.query + t.row(r), j = tile.key + t.column(c);
        if (along.bias.defined()) s[r][c] += load_element<T>(along.bias, site.offset_in(along.bias, i, j));
        if (along.distance.defined()) s[r][c] += site.distances(along.distance, i, j).template get<T>(0, 0);
      }
  }
};

}  // namespace attention_ops
