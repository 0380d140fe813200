// Backward in plain arithmetic, from lse: p = exp(s - lse), dp = do v', delta = sum_j p dp - grad_lse,
// ds = p (dp - delta), then dv = p' do, dk = ds' q, dq = ds k, grad_bias = sum ds, grad_sink = -sum exp(sink - lse)
// delta. One pass for the keys' side, one for the queries', one for a bias: every sum has one owner and one order.
#pragma once
#include "kernels/cuda/simt_forward.cuh"

namespace attention_ops {

template <class T>
DEVICE T row_value(const void* rows, Index i) {
  return device::load(static_cast<const T*>(rows) + i);
}
template <class T>
DEVICE void put_row_value(void* rows, Index i, T x) {
  device::store(static_cast<T*>(rows) + i, x);
}

// lse gives p at once, unless it is so large that its last digit would show in p.
template <class T>
DEVICE bool is_coarse(T lse) {
  return lse > 1024 ? lse < kInfinity<T> : lse < -1024 && lse > -kInfinity<T>;
}

// base = lse and log2_l = 0, or both counted again from the scores.
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
    each_key_tile(m, site, query, [&](SimtScores<T>& tile) {
      for (int r = 0; r < 4; ++r) rows.update(tile.s[r], r);
    });
  if (coarse && in.inexact && device::thread() == 0) device::raise(in.inexact);
  for (int r = 0; r < 4; ++r) {
    const T l = row_sum(rows.l[r]);
    if (t.tx > 0 || query + t.row(r) >= p.queries) continue;
    const Index i = site.row_of(query + t.row(r));
    const T lse = row_value<T>(in.lse, i), from_lse = lse == -kInfinity<T> ? T(0) : lse * kLog2e<T>;
    put_row_value(in.base, i, !coarse ? from_lse : rows.m[r] == -kInfinity<T> ? T(0) : rows.m[r]);
    put_row_value(in.log2_l, i, !coarse || l == 0 ? T(0) : device::log2(l));
  }
}

// delta = out . grad_out - grad_lse; a warp takes a row at a time.
template <class T>
DEVICE void find_delta(const Site& site, const BackwardInput& in, Index query) {
  const Problem& p = site.of;
  const Rows out(in.out, site.b, site.h, query), grad_out(in.grad_out, site.b, site.h, query);
  for (int row = device::thread() / 32; row < kSimtTile && query + row < p.queries; row += kSimtThreads / 32) {
    T sum = 0;
    with_stored<T>(out.of->element, [&]<class E>(E*) {
      for (Index d = device::thread() % 32; d < p.value_width; d += 32)
        sum += convert<T>(out.at<E>(row, d)) * convert<T>(grad_out.at<E>(row, d));
    });
    for (int n = 16; n > 0; n /= 2) sum += device::shuffle_xor(sum, n);
    if (device::thread() % 32 > 0) continue;
    const Index i = site.row_of(query + row);
    if (in.grad_lse) sum -= row_value<T>(in.grad_lse, i);
    if (in.inexact && !(sum - sum == 0)) device::raise(in.inexact);  // not finite: 0 times it is not 0
    put_row_value(in.delta, i, sum);
  }
}

// First pass: what each row needs.
template <class T>
__global__ void __launch_bounds__(kSimtThreads)
    simt_prepare_kernel(const __grid_constant__ Problem p, const __grid_constant__ BackwardInput in, Index tiles,
                        Index tasks) {
  for (Index task = device::block(); task < tasks; task += device::blocks()) {
    const Site site{p, task / tiles / p.heads, task / tiles % p.heads};
    find_norm<T>(SimtMemory<T>(), site, in, task % tiles * kSimtTile);
    find_delta<T>(site, in, task % tiles * kSimtTile);
  }
}

// The gradient of a tile's scores as a thread holds it.
template <class T>
struct SimtGradient {
  SimtValues<T> p, ds;  // the weights after dropout; before the softcap

  DEVICE void compute(const SimtMemory<T>& m, const Site& site, const BackwardInput& in, const SimtScores<T>& tile,
                      bool needs_ds) {
    const SimtThread t;
    const Problem& problem = site.of;
    const T factor = T(problem.dropout.scale());
    clear(ds);
    if (needs_ds)
      multiply_rows(ds, m, Rows(in.grad_out, site.b, site.h, tile.query), site.v(tile.key), problem.value_width);
    for (int r = 0; r < 4; ++r) {
      const Index query = tile.query + t.row(r), i = site.row_of(query);
      const bool real = query < problem.queries;
      const T base = real ? row_value<T>(in.base, i) : T(0), log2_l = real ? row_value<T>(in.log2_l, i) : T(0);
      const T delta = real ? row_value<T>(in.delta, i) : T(0);
      for (int c = 0; c < 4; ++c) {
        const bool visible = tile.sees(m, r, c), kept = !problem.dropout.on() || tile.keeps(m, r, c);
        const T w = visible ? device::exp2(tile.s[r][c] - base - log2_l) : T(0);
        ds[r][c] = visible ? w * ((kept ? factor * ds[r][c] : T(0)) - delta) : T(0);
        p[r][c] = kept ? factor * w : T(0);
      }
    }
  }
  // Through the softcap: the gradient of scale q k'.
  DEVICE void apply_slope(const SimtScores<T>& tile, const Problem& problem) {
    if (problem.softcap <= 0) return;
    for (int r = 0; r < 4; ++r)
      for (int c = 0; c < 4; ++c) ds[r][c] = ds[r][c] == 0 ? T(0) : ds[r][c] * tile.slope[r][c];
  }
};

template <class T>
DEVICE void put_weights(const SimtMemory<T>& m, const SimtValues<T>& x) {
  const SimtThread t;
  device::sync_threads();
  for (int r = 0; r < 4; ++r)
    for (int c = 0; c < 4; ++c) m.weights[t.row(r) * m.kStride + t.column(c)] = x[r][c];
}

template <class T>
DEVICE void put_gradient(const Tensor4& grad, Index b, Index h, Index row, Index part, const SimtValues<T>& x,
                         T factor) {
  const SimtThread t;
  const Rows rows(grad, b, h, row);
  for (int r = 0; r < 4; ++r)
    for (int c = 0; c < 4; ++c) rows.put(t.row(r), part * kSimtTile + t.column(c), factor * x[r][c]);
}

// Keys' side: a block owns 64 keys and 64 columns of dk and dv, and walks over the queries of all heads of the group.
template <class T>
DEVICE void keys_task(const Problem& p, const BackwardInput& in, const BackwardResult& result, Index part, Index key,
                      Index b, Index key_head) {
  const SimtMemory<T> m;
  const bool needs_k = result.grad_key.defined(), needs_v = result.grad_value.defined();
  SimtValues<T> dk, dv;
  clear(dk), clear(dv);
  SimtGradient<T> grad;
  for (Index h = key_head * p.group(); h < (key_head + 1) * p.group(); ++h) {
    const Site site{p, b, h};
    each_query_tile(m, site, key, [&](SimtScores<T>& tile) {
      grad.compute(m, site, in, tile, needs_k);
      if (needs_v) {
        put_weights(m, grad.p);
        multiply_columns<true>(dv, m, Rows(in.grad_out, b, h, tile.query), part * kSimtTile, tile.some);
      }
      if (!needs_k) return;
      grad.apply_slope(tile, p);
      put_weights(m, grad.ds);
      multiply_columns<true>(dk, m, site.q(tile.query), part * kSimtTile, tile.some);
    });
  }
  if (needs_k) put_gradient(result.grad_key, b, key_head, key, part, dk, T(p.scale));
  if (needs_v) put_gradient(result.grad_value, b, key_head, key, part, dv, T(1));
}

template <class T>
__global__ void __launch_bounds__(kSimtThreads)
    simt_keys_kernel(const __grid_constant__ Problem p, const __grid_constant__ BackwardInput in,
                     const __grid_constant__ BackwardResult result, Index parts, Index tiles, Index tasks) {
  if (nothing_to_do(p)) return;
  for (Index task = device::block(); task < tasks; task += device::blocks()) {
    const Index tile = task / parts % tiles, bh = task / parts / tiles;
    keys_task<T>(p, in, result, task % parts, tile * kSimtTile, bh / p.key_heads, bh % p.key_heads);
  }
}

// Queries' side: a block owns 64 queries and 64 columns of dq.
template <class T>
__global__ void __launch_bounds__(kSimtThreads)
    simt_queries_kernel(const __grid_constant__ Problem p, const __grid_constant__ BackwardInput in,
                        const __grid_constant__ BackwardResult result, Index parts, Index tiles, Index tasks) {
  if (nothing_to_do(p)) return;
  const SimtMemory<T> m;
  for (Index task = device::block(); task < tasks; task += device::blocks()) {
    const Index part = task % parts, query = (tiles - 1 - task / parts % tiles) * kSimtTile, bh = task / parts / tiles;
    const Site site{p, bh / p.heads, bh % p.heads};
    SimtValues<T> dq;
    clear(dq);
    SimtGradient<T> grad;
    each_key_tile(m, site, query, [&](SimtScores<T>& tile) {
      grad.compute(m, site, in, tile, true);
      grad.apply_slope(tile, p);
      put_weights(m, grad.ds);
      multiply_columns<false>(dq, m, site.k(tile.key), part * kSimtTile, tile.some);
    });
    put_gradient(result.grad_query, site.b, site.h, query, part, dq, T(p.scale));
  }
}

}  // namespace attention_ops
