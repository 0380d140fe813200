// Backward of the weights and of their summaries in plain arithmetic: ds = w dw, where the loss gives dw; lse is an
// input, and its gradient is minus the sum of ds. The passes are those of attention.
#pragma once
#include "kernels/cuda/simt_backward.cuh"
#include "kernels/cuda/simt_weights.cuh"

namespace attention_ops {

// dw of row i and key j
template <class T>
DEVICE T weight_gradient(const WeightGradient& of, const Site& site, Index i, Index j, T log2_w) {
  const Index row = site.row_of(i);
  T dw = 0;
  if (of.grad.defined()) dw += T(of.factor) * load_element<T>(of.grad, site.offset_in(of.grad, i, j));
  if (of.column_sum) dw += row_value<T>(of.column_sum, (site.b * site.of.heads + site.h) * site.of.keys + j);
  if (of.maximum && device::load(of.argmax + row) == j) dw += row_value<T>(of.maximum, row);
  if (of.entropy && counts(log2_w)) dw -= row_value<T>(of.entropy, row) * (log2_w * kLn2<T> + T(1));
  return dw;
}

template <class T>
struct SimtGradients<T, WeightGradient> : SimtGradients<T, Still> {
  using SimtGradients<T, Still>::grad;

  DEVICE void compute(const SimtMemory<T>& m, const Site& site, const BackwardInput& in, const WeightGradient& source,
                      const SimtScores<T>& tile, bool) {
    const SimtThread t;
    clear(grad.p), clear(grad.ds);
    each_weight(m, site, in, tile, [&](int r, int c, T log2_w) {
      grad.p[r][c] = device::exp2(log2_w);
      const Index i = tile.query + t.row(r), j = tile.key + t.column(c);
      grad.ds[r][c] = grad.p[r][c] * weight_gradient(source, site, i, j, log2_w);
    });
  }
  template <class F>
  DEVICE void each_term(const Problem& p, const BackwardInput& in, const WeightGradient&, F&& f) const {
    f(grad, SimtFactors{p.q, p.k, in.grad_out, p.distance});
  }
};

template <class T>
struct SimtLseGradient<T, WeightGradient> {
  T rows[4] = {};

  DEVICE void subtract(const SimtValues<T>& ds) {
    for (int r = 0; r < 4; ++r)
      for (int c = 0; c < 4; ++c) rows[r] -= ds[r][c];
  }
  DEVICE void put(const BackwardResult& result, const Site& site, Index query) const {
    const SimtThread t;
    for (int r = 0; r < 4; ++r) {
      const T sum = row_sum(rows[r]);
      const Index i = query + t.row(r);
      if (result.grad_lse && t.tx == 0 && i < site.of.queries) put_row_value(result.grad_lse, site.row_of(i), sum);
    }
  }
};

}  // namespace attention_ops
