// The tangent of the backward of weights and of their summaries, in plain arithmetic and by the loops of attention:
//   ds = w dw,  ds_dot = w (s_dot - lse_dot) dw + w dw_dot
#pragma once
#include "kernels/cuda/simt_second.cuh"
#include "kernels/cuda/simt_weight_gradient.cuh"

namespace attention_ops {

template <class T>
struct SimtGradients<T, WeightGradientTangent> : SimtGradients<T, BackwardTangent> {
  using SimtGradients<T, BackwardTangent>::grad;
  using SimtGradients<T, BackwardTangent>::moved;
  using SimtGradients<T, BackwardTangent>::dot;

  DEVICE void compute(const SimtMemory<T>& m, const Site& site, const BackwardInput& in,
                      const WeightGradientTangent& along, const SimtScores<T>& tile, bool) {
    const SimtThread t;
    clear(grad.p), clear(grad.ds), clear(moved.p), clear(moved.ds);
    dot.compute(site, along.of, tile);
    each_weight(m, site, in, tile, [&](int r, int c, T log2_w) {
      const Index i = tile.query + t.row(r), j = tile.key + t.column(c);
      const T w = device::exp2(log2_w), log_dot = log_tangent(dot, site, along.of, i, r, c);
      T dw_dot = weight_gradient(along.moved, site, i, j, log2_w);
      if (along.source.entropy && counts(log2_w))
        dw_dot -= row_value<T>(along.source.entropy, site.row_of(i)) * log_dot;
      grad.ds[r][c] = w * weight_gradient(along.source, site, i, j, log2_w);
      moved.ds[r][c] = log_dot * grad.ds[r][c] + w * dw_dot;
    });
  }
  template <class F>
  DEVICE void each_term(const Problem& p, const BackwardInput& in, const WeightGradientTangent& along, F&& f) const {
    f(moved, SimtFactors{p.q, p.k, in.grad_out, p.distance});
    f(grad, SimtFactors{along.of.q, along.of.k, in.grad_out, along.of.distance});
  }
};

template <class T>
struct SimtLseGradient<T, WeightGradientTangent> : SimtLseGradient<T, WeightGradient> {};

}  // namespace attention_ops
