// Gradients that sum over many places: of a bias in any broadcast shape, and of the sinks.
#pragma once
#include "kernels/cuda/simt_backward.cuh"

namespace attention_ops {

// How many places along each axis one owner sums over, and where it begins.
struct BiasOwner {
  Index first[4], count[4];  // batch, head, row tile, column tile

  DEVICE BiasOwner(const Problem& p, const Tensor4& grad, const BiasPlan& plan, Index owner) {
    const Index all[4] = {p.batch, p.heads, plan.rows, plan.columns};
    for (int axis = 3; axis >= 0; --axis) {
      const bool summed = grad.sizes[axis] == 1;
      first[axis] = summed ? 0 : owner % all[axis];
      count[axis] = summed ? all[axis] : 1;
      if (!summed) owner /= all[axis];
    }
  }
  DEVICE Index size() const { return count[0] * count[1] * count[2] * count[3]; }
};

// Sums of a 64 x 64 tile over its rows, columns or both, left in every thread that owns the result's place. A thread
// sums one line: a long chain would round as often as it is long.
template <class T>
DEVICE void reduce_tile(const SimtMemory<T>& m, SimtValues<T>& x, bool over_rows, bool over_columns) {
  const SimtThread t;
  const int line = device::thread();
  const auto sum_line = [&](int first, int step) {
    T sum = 0;
    for (int n = 0; n < kSimtTile; ++n) sum += m.weights[first + n * step];
    m.weights[first] = sum;
  };
  put_weights(m, x);
  device::sync_threads();
  if (!over_rows && !over_columns) return;
  if (over_columns && line < kSimtTile) sum_line(line * m.kStride, 1);
  device::sync_threads();
  if (over_rows && line < (over_columns ? 1 : kSimtTile)) sum_line(line, m.kStride);
  device::sync_threads();
  for (int r = 0; r < 4; ++r)
    for (int c = 0; c < 4; ++c) x[r][c] = m.weights[t.row(r) * m.kStride + t.column(c)];
}

// One tile of scores, its gradient added to the sum.
template <class T, class Along>
DEVICE void add_bias_tile(SimtValues<T>& sum, const SimtMemory<T>& m, const Site& site, const BackwardInput& in,
                          const Along& along, Index row, Index column) {
  const Cover cover = site.cover(row * kSimtTile, kSimtTile, column * kSimtTile, kSimtTile);
  if (cover == Cover::none) return;
  SimtScores<T> tile;
  tile.compute(site, row * kSimtTile, column * kSimtTile, cover == Cover::all);
  SimtGradients<T, Along> grads;
  grads.compute(m, site, in, along, tile, true);
  for (int r = 0; r < 4; ++r)
    for (int c = 0; c < 4; ++c) sum[r][c] += grads.result().ds[r][c];
}

template <class T, class Along>
__global__ void __launch_bounds__(kSimtThreads, kSimtBlocks<T>)
    simt_bias_kernel(const __grid_constant__ Problem p, const __grid_constant__ BackwardInput in,
                     const __grid_constant__ Along along, const __grid_constant__ Tensor4 grad,
                     const __grid_constant__ BiasPlan plan) {
  const SimtMemory<T> m;
  const SimtThread t;
  for (Index task = device::block(); task < plan.tasks(); task += device::blocks()) {
    const Index share = task / plan.owners;
    const BiasOwner owner(p, grad, plan, task % plan.owners);
    SimtValues<T> sum;
    clear(sum);
    for (Index n = owner.size() * share / plan.shares; n < owner.size() * (share + 1) / plan.shares; ++n) {
      const Index column = n % owner.count[3], row = n / owner.count[3] % owner.count[2];
      const Index h = n / owner.count[3] / owner.count[2] % owner.count[1];
      const Index b = n / owner.count[3] / owner.count[2] / owner.count[1];
      add_bias_tile(sum, m, Site{p, owner.first[0] + b, owner.first[1] + h}, in, along, owner.first[2] + row,
                    owner.first[3] + column);
    }
    const bool over_rows = grad.sizes[2] == 1, over_columns = grad.sizes[3] == 1;
    reduce_tile(m, sum, over_rows, over_columns);
    for (int r = 0; r < 4; ++r)
      for (int c = 0; c < 4; ++c) {
        const Index i = owner.first[2] * kSimtTile + t.row(r), j = owner.first[3] * kSimtTile + t.column(c);
        if (i >= grad.sizes[2] || j >= grad.sizes[3]) continue;
        const Index slice = owner.first[0] * grad.sizes[1] + owner.first[1];
        const Index place = (slice * grad.sizes[2] + i) * grad.sizes[3] + j;
        const Index all = grad.sizes[0] * grad.sizes[1] * grad.sizes[2] * grad.sizes[3];
        if (plan.sums)
          put_row_value(plan.sums, share * all + place, sum[r][c]);
        else
          store_element(grad, place, sum[r][c]);  // grad_bias is contiguous
      }
  }
}

// A contiguous gradient = the sum of its shares, in their order
template <class T>
__global__ void __launch_bounds__(kSimtThreads)
    simt_shares_kernel(const __grid_constant__ Tensor4 grad, const void* sums, Index shares, Index places) {
  for (Index n = device::block() * kSimtThreads + device::thread(); n < places; n += device::blocks() * kSimtThreads) {
    T sum = 0;
    for (Index share = 0; share < shares; ++share) sum += row_value<T>(sums, share * places + n);
    store_element(grad, n, sum);
  }
}

template <class T>
DEVICE T sink_term(const Site&, const BackwardInput& in, const Still&, Index i) {
  return row_value<T>(in.delta, i);
}

// A block owns a head: -sum over batches and rows of exp(sink - lse) delta, or its tangent.
template <class T, class Along>
__global__ void __launch_bounds__(kSimtThreads)
    simt_sinks_kernel(const __grid_constant__ Problem p, const __grid_constant__ BackwardInput in,
                      const __grid_constant__ Along along, void* grad_sinks) {
  const device::Shared<T> sums = device::shared<T>(0);
  for (Index h = device::block(); h < p.heads; h += device::blocks()) {
    T sum = 0;
    for (Index n = device::thread(); n < p.batch * p.queries; n += kSimtThreads) {
      const Site site{p, n / p.queries, h};
      const T weight = SimtNorm<T>(in, site, n % p.queries).weight(site.template sink<T>());
      if (weight != 0) sum -= weight * sink_term<T>(site, in, along, site.row_of(n % p.queries));
    }
    device::sync_threads();
    sums[device::thread()] = sum;
    for (int half = kSimtThreads / 2; half > 0; half /= 2) {
      device::sync_threads();
      if (device::thread() < half) sums[device::thread()] = sums[device::thread()] + sums[device::thread() + half];
    }
    if (device::thread() == 0) put_row_value(grad_sinks, h, T(sums[0]));
  }
}

}  // namespace attention_ops
