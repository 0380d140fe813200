// Backward in plain arithmetic, from lse: p = exp(s - lse), dp = do (v + b)', delta = sum_j p dp - grad_lse,
// ds = p (dp - delta), then dv = p' do, dk = ds' q, dq = ds (k + a), grad_bias = sum ds, and of rows by distance sums
// along diagonals, dr = sum ds, da = sum ds q, db = sum p do; grad_sink = -sum exp(sink - lse) delta. One pass for the
// keys' side, one for the queries', one for each of the others: every sum has one owner and one order.
// Along is Still here, and BackwardTangent in a second derivative (simt_second.cuh).
#pragma once
#include "kernels/cuda/simt_row_norm.cuh"

namespace attention_ops {

// A row of one tensor times the same of another; the lanes of a warp share it.
template <class T>
DEVICE T row_product(const Rows& a, const Rows& b, int row, Index width) {
  T sum = 0;
  with_stored<T>(a.of->element, [&]<class A>(A*) {
    with_stored<T>(b.of->element, [&]<class B>(B*) {
      for (Index d = device::thread() % 32; d < width; d += 32)
        sum += convert<T>(a.at<A>(row, d)) * convert<T>(b.at<B>(row, d));
    });
  });
  for (int n = 16; n > 0; n /= 2) sum += device::shuffle_xor(sum, n);
  return sum;
}

// Calls f(row within the tile) for each; a warp takes a row at a time.
template <class F>
DEVICE void each_row(const Problem& p, Index query, F&& f) {
  for (int row = device::thread() / 32; row < kSimtTile && query + row < p.queries; row += kSimtThreads / 32) f(row);
}

// delta = out . grad_out - grad_lse
template <class T>
DEVICE void find_delta(const Site& site, const BackwardInput& in, Index query) {
  if (!in.delta) return;
  const Rows out = site.queries_of(in.out, query), grad_out = site.queries_of(in.grad_out, query);
  each_row(site.of, query, [&](int row) {
    T sum = row_product<T>(out, grad_out, row, site.of.value_width);
    if (device::thread() % 32 > 0) return;
    const Index i = site.row_of(query + row);
    if (in.grad_lse) sum -= row_value<T>(in.grad_lse, i);
    if (in.inexact && !(sum - sum == 0)) device::raise(in.inexact);  // not finite: 0 times it is not 0
    put_row_value(in.delta, i, sum);
  });
}

// First pass: what each row needs.
template <class T>
__global__ void __launch_bounds__(kSimtThreads, kSimtBlocks<T>)
    simt_prepare_kernel(const __grid_constant__ Problem p, const __grid_constant__ BackwardInput in, Index tiles,
                        Index tasks) {
  for (Index task = device::block(); task < tasks; task += device::blocks()) {
    const Site site{p, task / tiles / p.heads, task / tiles % p.heads};
    find_norm<T>(SimtMemory<T>(), site, in, task % tiles * kSimtTile);
    find_delta<T>(site, in, task % tiles * kSimtTile);
  }
}

// The gradient of a tile's scores as a thread holds it, before the softcap, and the weights before dropout.
template <class T>
struct SimtGradient {
  SimtValues<T> p, ds;

  DEVICE void compute(const SimtMemory<T>& m, const Site& site, const BackwardInput& in, const SimtScores<T>& tile,
                      bool needs_ds) {
    const SimtThread t;
    const Problem& problem = site.of;
    const SimtDropout<T> dropped(m, tile, problem);
    clear(ds);
    if (needs_ds) {
      multiply_rows(ds, site.queries_of(in.grad_out, tile.query), site.v(tile.key), problem.value_width);
      multiply_distances(ds, site, tile.query, tile.key, in.grad_out, problem.distance, problem.value_columns());
    }
    for (int r = 0; r < 4; ++r) {
      const Index query = tile.query + t.row(r);
      const SimtNorm<T> norm(in, site, query);
      const T delta = query < problem.queries ? row_value<T>(in.delta, site.row_of(query)) : T(0);
      for (int c = 0; c < 4; ++c) {
        const bool visible = tile.sees(m, r, c);
        p[r][c] = visible ? norm.weight(tile.s[r][c]) : T(0);
        ds[r][c] = visible ? p[r][c] * (dropped(ds[r][c], r, c) - delta) : T(0);
      }
    }
  }
};

// What the gradients of scores are multiplied by in a sum of products.
struct SimtFactors {
  const Tensor4 &q, &k, &grad_out, &distance;
};

// What a tile gives to the gradients: of a first derivative.
template <class T, class Along>
struct SimtGradients {
  SimtGradient<T> grad;

  DEVICE void compute(const SimtMemory<T>& m, const Site& site, const BackwardInput& in, const Along&,
                      const SimtScores<T>& tile, bool needs_ds) {
    grad.compute(m, site, in, tile, needs_ds);
  }
  // Through the softcap to the gradient of scale q k', and p after dropout.
  DEVICE void finish(const SimtMemory<T>& m, const SimtScores<T>& tile, const Problem& problem) {
    SimtDropout<T>(m, tile, problem).apply(grad.p);
    if (problem.softcap <= 0) return;
    for (int r = 0; r < 4; ++r)
      for (int c = 0; c < 4; ++c) grad.ds[r][c] = grad.ds[r][c] == 0 ? T(0) : grad.ds[r][c] * tile.slope(r, c);
  }
  DEVICE const SimtGradient<T>& result() const { return grad; }
  // Calls f(gradient, factors) for each product that the gradients sum.
  template <class F>
  DEVICE void each_term(const Problem& p, const BackwardInput& in, const Along&, F&& f) const {
    f(grad, SimtFactors{p.q, p.k, in.grad_out, p.distance});
  }
};

// acc += a x, or a' x, of a tensor that may be none
template <bool Transposed, class T>
DEVICE void add_product(SimtValues<T>& acc, const SimtMemory<T>& m, const SimtValues<T>& a, const Rows& x, Index part,
                        bool some) {
  if (!x.of->defined()) return;
  put_weights(m, a);
  multiply_columns<Transposed>(acc, x, part * kSimtTile, some);
}

template <class T>
DEVICE_APART void put_gradient(const Tensor4& grad, Index b, Index h, Index row, Index part, const SimtValues<T>& x,
                               T factor) {
  const SimtThread t;
  const Rows rows(grad, b, h, row);
  for (int r = 0; r < 4; ++r)
    for (int c = 0; c < 4; ++c) rows.put(t.row(r), part * kSimtTile + t.column(c), factor * x[r][c]);
}

// Keys' side: a block owns 64 keys and 64 columns of dk and dv, and walks over the queries of all heads of the group.
template <class T, class Along>
DEVICE void keys_task(const Problem& p, const BackwardInput& in, const Along& along, const BackwardResult& result,
                      Index part, Index key, Index b, Index key_head) {
  const SimtMemory<T> m;
  const bool needs_k = result.grad_key.defined(), needs_v = result.grad_value.defined();
  SimtValues<T> dk, dv;
  clear(dk), clear(dv);
  SimtGradients<T, Along> grads;
  for (Index h = key_head * p.group(); h < (key_head + 1) * p.group(); ++h) {
    const Site site{p, b, h};
    each_query_tile<T>(site, key, [&](SimtScores<T>& tile) {
      grads.compute(m, site, in, along, tile, needs_k);
      grads.finish(m, tile, p);
      grads.each_term(p, in, along, [&](const auto& grad, const SimtFactors& by) {
        if (needs_v) add_product<true>(dv, m, grad.p, site.queries_of(by.grad_out, tile.query), part, tile.some);
        if (needs_k) add_product<true>(dk, m, grad.ds, site.queries_of(by.q, tile.query), part, tile.some);
      });
    });
  }
  if (needs_k) put_gradient(result.grad_key, b, key_head, key, part, dk, T(p.scale));
  if (needs_v) put_gradient(result.grad_value, b, key_head, key, part, dv, T(1));
}

template <class T, class Along>
__global__ void __launch_bounds__(kSimtThreads, kSimtBlocks<T>)
    simt_keys_kernel(const __grid_constant__ Problem p, const __grid_constant__ BackwardInput in,
                     const __grid_constant__ Along along, const __grid_constant__ BackwardResult result, Index parts,
                     Index tiles, Index tasks) {
  if (nothing_to_do(p)) return;
  for (Index task = device::block(); task < tasks; task += device::blocks()) {
    const Index tile = task / parts % tiles, bh = task / parts / tiles;
    keys_task<T>(p, in, along, result, task % parts, tile * kSimtTile, bh / p.key_heads, bh % p.key_heads);
  }
}

// The gradient of lse where it is an input of its own; here it is not.
template <class T, class Along>
struct SimtLseGradient {
  DEVICE void subtract(const SimtValues<T>&) {}
  DEVICE void put(const BackwardResult&, const Site&, Index) const {}
};

// Queries' side: a block owns 64 queries and 64 columns of dq.
template <class T, class Along>
__global__ void __launch_bounds__(kSimtThreads, kSimtBlocks<T>)
    simt_queries_kernel(const __grid_constant__ Problem p, const __grid_constant__ BackwardInput in,
                        const __grid_constant__ Along along, const __grid_constant__ BackwardResult result, Index parts,
                        Index tiles, Index tasks) {
  if (nothing_to_do(p)) return;
  const SimtMemory<T> m;
  for (Index task = device::block(); task < tasks; task += device::blocks()) {
    const Index part = task % parts, query = (tiles - 1 - task / parts % tiles) * kSimtTile, bh = task / parts / tiles;
    const Site site{p, bh / p.heads, bh % p.heads};
    SimtValues<T> dq;
    clear(dq);
    SimtGradients<T, Along> grads;
    SimtLseGradient<T, Along> lse;
    each_key_tile<T>(site, query, [&](SimtScores<T>& tile) {
      grads.compute(m, site, in, along, tile, true);
      lse.subtract(grads.result().ds);
      grads.finish(m, tile, p);
      grads.each_term(p, in, along, [&](const auto& grad, const SimtFactors& by) {
        put_weights(m, grad.ds);
        if (by.k.defined()) multiply_columns<false>(dq, site.keys_of(by.k, tile.key), part * kSimtTile, tile.some);
        add_distances(dq, site, query, tile.key, by.distance, p.key_columns(), part, tile.some);
      });
    });
    if (result.grad_query.defined()) put_gradient(result.grad_query, site.b, site.h, query, part, dq, T(p.scale));
    if (part == 0) lse.put(result, site, query);
  }
}

}  // namespace attention_ops
