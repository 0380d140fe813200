// The tangent of the backward pass, in plain arithmetic and by its own loops, for which the results then stand:
//   p_dot = p (s_dot - lse_dot),  ds_dot = p_dot (dp - delta) + p (dp_dot - delta_dot),  and with x as in simt_tangents
//   dx = softcap'(x) ds,  dx_dot = softcap'(x) ds_dot + softcap''(x) x_dot ds,
//   dv_dot = p_dot' do + p' do_dot,  dk_dot = dx_dot' q + dx' q_dot,  dq_dot = dx_dot (k + a) + dx (k_dot + a_dot),
//   grad_bias_dot = sum ds_dot, grad_sink_dot = -sum exp(sink - lse) ((sink_dot - lse_dot) delta + delta_dot).
#pragma once
#include "kernels/cuda/simt_backward.cuh"
#include "kernels/cuda/simt_tangents.cuh"

namespace attention_ops {

// delta_dot = out . grad_out_dot + out_dot . grad_out - grad_lse_dot
template <class T>
__global__ void __launch_bounds__(kSimtThreads)
    simt_delta_tangent_kernel(const __grid_constant__ Problem p, const __grid_constant__ BackwardInput in,
                              const __grid_constant__ BackwardTangent along, Index tiles, Index tasks) {
  for (Index task = device::block(); task < tasks; task += device::blocks()) {
    const Site site{p, task / tiles / p.heads, task / tiles % p.heads};
    const Index query = task % tiles * kSimtTile;
    const auto rows = [&](const Tensor4& x) { return site.queries_of(x, query); };
    each_row(p, query, [&](int row) {
      T sum = row_product<T>(rows(along.out), rows(in.grad_out), row, p.value_width);
      if (along.grad_out.defined()) sum += row_product<T>(rows(in.out), rows(along.grad_out), row, p.value_width);
      if (device::thread() % 32 > 0) return;
      const Index i = site.row_of(query + row);
      if (along.grad_lse) sum -= row_value<T>(along.grad_lse, i);
      put_row_value(along.delta, i, sum);
    });
  }
}

template <class T>
DEVICE T sink_term(const Site& site, const BackwardInput& in, const BackwardTangent& along, Index i) {
  const T sink = along.of.sinks ? row_value<T>(along.of.sinks, site.h) : T(0);
  return (sink - row_value<T>(along.of.lse, i)) * row_value<T>(in.delta, i) + row_value<T>(along.delta, i);
}

// A tile's gradients and their tangents.
template <class T>
struct SimtGradients<T, BackwardTangent> {
  SimtGradient<T> grad, moved;
  SimtTangent<T> dot;

  DEVICE void compute(const SimtMemory<T>& m, const Site& site, const BackwardInput& in, const BackwardTangent& along,
                      const SimtScores<T>& tile, bool needs_ds) {
    grad.compute(m, site, in, tile, needs_ds);
    dot.compute(site, along.of, tile);
    clear(moved.ds);
    if (needs_ds) add_gradient_tangent(m, site, in, along, tile);
    const SimtThread t;
    const SimtDropout<T> dropped(m, tile, site.of);
    for (int r = 0; r < 4; ++r) {
      const Index query = tile.query + t.row(r), i = site.row_of(query);
      const bool real = query < site.of.queries;
      const T lse = real ? row_value<T>(along.of.lse, i) : T(0), delta = real ? row_value<T>(along.delta, i) : T(0);
      for (int c = 0; c < 4; ++c) {
        const bool visible = tile.sees(m, r, c);
        const T p = grad.p[r][c], log_p = dot.s[r][c] - lse;
        moved.p[r][c] = visible ? p * log_p : T(0);
        moved.ds[r][c] = visible ? log_p * grad.ds[r][c] + p * (dropped(moved.ds[r][c], r, c) - delta) : T(0);
      }
    }
  }
  DEVICE void finish(const SimtMemory<T>& m, const SimtScores<T>& tile, const Problem& problem) {
    const SimtDropout<T> dropout(m, tile, problem);
    dropout.apply(grad.p), dropout.apply(moved.p);
    if (problem.softcap <= 0) return;
    for (int r = 0; r < 4; ++r)
      for (int c = 0; c < 4; ++c) {
        const T slope = tile.slope(r, c), ds = grad.ds[r][c], moved_ds = moved.ds[r][c];
        const T bend = T(-2) * tile.tanh[r][c] * slope * dot.x[r][c];  // the tangent of the slope
        grad.ds[r][c] = ds == 0 ? T(0) : slope * ds;
        moved.ds[r][c] = (moved_ds == 0 ? T(0) : slope * moved_ds) + (ds == 0 ? T(0) : bend * ds);
      }
  }
  DEVICE const SimtGradient<T>& result() const { return moved; }
  template <class F>
  DEVICE void each_term(const Problem& p, const BackwardInput& in, const BackwardTangent& along, F&& f) const {
    f(moved, SimtFactors{p.q, p.k, in.grad_out, p.distance});
    f(grad, SimtFactors{along.of.q, along.of.k, along.grad_out, along.of.distance});
  }

 private:
  // dp_dot = do_dot (v + b)' + do (v_dot + b_dot)'
  DEVICE void add_gradient_tangent(const SimtMemory<T>& m, const Site& site, const BackwardInput& in,
                                   const BackwardTangent& along, const SimtScores<T>& tile) {
    const Index width = site.of.value_width;
    if (along.grad_out.defined())
      multiply_rows(moved.ds, site.queries_of(along.grad_out, tile.query), site.v(tile.key), width);
    if (along.of.v.defined())
      multiply_rows(moved.ds, site.queries_of(in.grad_out, tile.query), site.keys_of(along.of.v, tile.key), width);
    const DistanceColumns columns = site.of.value_columns();
    multiply_distances(moved.ds, site, tile.query, tile.key, along.grad_out, site.of.distance, columns);
    multiply_distances(moved.ds, site, tile.query, tile.key, in.grad_out, along.of.distance, columns);
  }
};

}  // namespace attention_ops
