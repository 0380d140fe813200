// The gradient of rows by distance in plain arithmetic: dr = sum ds, da = sum ds q and db = sum p do along diagonals. A
// block owns 64 rows and 64 columns (DistancePlan) and walks over the tiles that its diagonals cross, each of which two
// blocks meet.
#pragma once
#include "kernels/cuda/simt_backward.cuh"

namespace attention_ops {

// What one task owns.
struct DistanceOwner {
  Index part, range, batch, head;  // the last two of the tables

  DEVICE DistanceOwner(const Tensor4& grad, const DistancePlan& plan, Index owner)
      : part(owner % plan.parts()),
        range(owner / plan.parts() % plan.ranges),
        batch(owner / plan.parts() / plan.ranges / grad.sizes[1]),
        head(owner / plan.parts() / plan.ranges % grad.sizes[1]) {}
};

// sum[r][c] += sum_n weights(n, row + n - skipped) x(n, first + column)
template <class T>
DEVICE_APART void multiply_across(SimtValues<T>& sum, const Rows& x, Index first, int skipped, bool some) {
  multiply_cells<true>(sum, x, rows_in_tile(x), first, some,
                       [&](int own, int n) { return Cell{n, own + n - skipped}; });
}

// The sums of a thread: of 64 columns, and for the first 64 threads those of a row's bias.
template <class T>
struct DistanceSums {
  T bias = 0;
  SimtValues<T> columns;

  // Row n of the range meets key n + i - skipped of query i; keys outside of the tile are another tile's.
  DEVICE void add_bias(const SimtMemory<T>& m, const SimtValues<T>& ds, int skipped) {
    put_weights(m, ds);
    device::sync_threads();
    if (device::thread() >= kSimtTile) return;
    T sum = 0;
    for (int i = 0; i < kSimtTile; ++i)
      if (const int j = device::thread() + i - skipped; j >= 0 && j < kSimtTile) sum += m.weights[i * m.kStride + j];
    bias += sum;
  }
  DEVICE void add_columns(const SimtMemory<T>& m, const SimtValues<T>& a, const Rows& x, Index part, int skipped,
                          bool some) {
    if (!x.of->defined()) return;
    put_weights(m, a);
    multiply_across(columns, x, part * kSimtTile, skipped, some);
  }
};

// What one tile gives, of which the task's rows are the diagonals from the main one on, or, with 64 skipped, from 64
// below it on.
template <class T, class Along>
DEVICE void add_distance_tile(DistanceSums<T>& sums, const SimtMemory<T>& m, const Site& site, const BackwardInput& in,
                              const Along& along, const DistancePlan& plan, Index part, Index row, Index column,
                              int skipped) {
  if (column < 0 || column >= plan.columns) return;
  const Index query = row * kSimtTile, key = column * kSimtTile;
  const Cover cover = site.cover(query, kSimtTile, key, kSimtTile);
  if (cover == Cover::none) return;
  const bool of_values = part >= plan.key_parts;
  SimtScores<T> tile;
  tile.compute(site, query, key, cover == Cover::all);
  SimtGradients<T, Along> grads;
  grads.compute(m, site, in, along, tile, !of_values);
  if (part == 0) sums.add_bias(m, grads.result().ds, skipped);
  if ((of_values ? site.of.value_columns() : site.of.key_columns()).count == 0) return;
  grads.finish(m, tile, site.of);
  grads.each_term(site.of, in, along, [&](const auto& grad, const SimtFactors& by) {
    if (of_values)
      sums.add_columns(m, grad.p, site.queries_of(by.grad_out, query), part - plan.key_parts, skipped, tile.some);
    else
      sums.add_columns(m, grad.ds, site.queries_of(by.q, query), part, skipped, tile.some);
  });
}

template <class T>
DEVICE void put_distances(const DistanceSums<T>& sums, const Problem& p, const Tensor4& grad, const DistancePlan& plan,
                          const DistanceOwner& owner, Index share) {
  const SimtThread t;
  const Index first = (owner.range - plan.before) * kSimtTile + p.queries - 1;
  const Index table = (share * grad.sizes[0] + owner.batch) * grad.sizes[1] + owner.head;
  const auto put = [&](Index row, Index column, T x) {
    if (row < 0 || row >= grad.sizes[2]) return;
    const Index place = (table * grad.sizes[2] + row) * grad.sizes[3] + column;
    if (plan.sums)
      put_row_value(plan.sums, place, x);
    else
      store_element(grad, place, x);  // grad_distance is contiguous
  };
  if (owner.part == 0 && device::thread() < kSimtTile) put(first + device::thread(), 0, sums.bias);
  const bool of_values = owner.part >= plan.key_parts;
  const DistanceColumns columns = of_values ? p.value_columns() : p.key_columns();
  const T factor = of_values ? T(1) : T(p.scale);
  for (int r = 0; r < 4; ++r)
    for (int c = 0; c < 4; ++c) {
      const Index column = (of_values ? owner.part - plan.key_parts : owner.part) * kSimtTile + t.column(c);
      if (column < columns.count) put(first + t.row(r), columns.first + column, factor * sums.columns[r][c]);
    }
}

template <class T, class Along>
__global__ void __launch_bounds__(kSimtThreads, kSimtBlocks<T>)
    simt_distance_kernel(const __grid_constant__ Problem p, const __grid_constant__ BackwardInput in,
                         const __grid_constant__ Along along, const __grid_constant__ Tensor4 grad,
                         const __grid_constant__ DistancePlan plan) {
  const SimtMemory<T> m;
  for (Index task = device::block(); task < plan.tasks(); task += device::blocks()) {
    const Index share = task / plan.owners;
    const DistanceOwner owner(grad, plan, task % plan.owners);
    DistanceSums<T> sums;
    clear(sums.columns);
    for (Index n = plan.terms() * share / plan.shares; n < plan.terms() * (share + 1) / plan.shares; ++n) {
      const Index row = n % plan.rows, h = n / plan.rows % plan.heads, b = n / plan.rows / plan.heads;
      const Site site{p, owner.batch + b, owner.head + h};
      const Index column = row + owner.range - plan.before;
#pragma unroll 1
      for (int below = 0; below < 2; ++below)
        add_distance_tile(sums, m, site, in, along, plan, owner.part, row, column + below, below * kSimtTile);
    }
    put_distances(sums, p, grad, plan, owner, share);
  }
}

}  // namespace attention_ops
