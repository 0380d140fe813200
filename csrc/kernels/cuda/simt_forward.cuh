// Forward in plain arithmetic: s = scale q k', p = exp(s - m), l = sum p, o = p v / l, lse = m + log l, with m, l and o
// updated tile by tile. A block owns 64 queries and 64 columns of the values; wider values are several tasks.
#pragma once
#include "kernels/cuda/simt_tile.cuh"

namespace attention_ops {

// The running softmax of a thread's rows.
template <class T>
struct SimtRows {
  T m[4], l[4];

  DEVICE explicit SimtRows(T sink) {
    for (int r = 0; r < 4; ++r) m[r] = sink, l[r] = SimtThread().tx == 0 && sink != -kInfinity<T>;
  }

  // m' = max(m, s), s := p = 2^(s - m'), l := alpha l + sum p, with this thread's part of the sum; returns
  // alpha = 2^(m - m'), exactly 1 where m stays, or errors would add up.
  DEVICE T update(T (&s)[4], int r) {
    T top = s[0];
    for (const T x : s) top = x > top ? x : top;
    top = row_max(top);
    top = m[r] > top ? m[r] : top;
    const T base = top > -kInfinity<T> ? top : T(0);  // nothing visible yet
    const T alpha = m[r] == base ? T(1) : device::exp2(m[r] - base);
    l[r] *= alpha;
    for (T& x : s) l[r] += x = device::exp2(x - base);
    m[r] = top;
    return alpha;
  }
};

template <class T>
DEVICE void forward_task(const Problem& p, const ForwardResult& result, Index parts, Index tiles, Index task) {
  const Index part = task % parts, bh = task / parts / tiles;
  const Index query = (tiles - 1 - task / parts % tiles) * kSimtTile;  // the longest of a causal mask first
  const Site site{p, bh / p.heads, bh % p.heads};
  const SimtMemory<T> m;
  const SimtThread t;
  SimtRows<T> rows(site.sink<T>());
  SimtValues<T> o;
  clear(o);
  each_key_tile<T>(site, query, [&](SimtScores<T>& tile) {
    for (int r = 0; r < 4; ++r) {
      const T alpha = rows.update(tile.s[r], r);
      for (int c = 0; c < 4; ++c) {
        const bool kept = !p.dropout.on() || tile.keeps(m, r, c);
        m.weights[t.row(r) * m.kStride + t.column(c)] = kept ? tile.s[r][c] : T(0);
        o[r][c] *= alpha;
      }
    }
    multiply_columns<false>(o, site.v(tile.key), part * kSimtTile, tile.some);
    add_distances(o, site, query, tile.key, p.distance, p.value_columns(), part, tile.some);
  });
  const Rows out(result.out, site.b, site.h, query);
  for (int r = 0; r < 4; ++r) {
    const T l = row_sum(rows.l[r]), factor = l == 0 ? T(0) : T(p.dropout.scale) / l;
    for (int c = 0; c < 4; ++c) out.put(t.row(r), part * kSimtTile + t.column(c), o[r][c] * factor);
    if (part > 0 || t.tx > 0 || query + t.row(r) >= p.queries) continue;
    const T lse = l == 0 ? -kInfinity<T> : (rows.m[r] + device::log2(l)) * kLn2<T>;
    device::store(static_cast<T*>(result.lse) + site.row_of(query + t.row(r)), lse);
  }
}

template <class T>
__global__ void __launch_bounds__(kSimtThreads, kSimtBlocks<T>)
    simt_forward_kernel(const __grid_constant__ Problem p, const __grid_constant__ ForwardResult result, Index parts,
                        Index tiles, Index tasks) {
  if (nothing_to_do(p)) return;
  for (Index task = device::block(); task < tasks; task += device::blocks())
    forward_task<T>(p, result, parts, tiles, task);
}

}  // namespace attention_ops
