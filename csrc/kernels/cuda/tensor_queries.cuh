// Backward on tensor cores, the queries' side: a block owns a tile of queries, walks over the visible tiles of keys,
// and sums dq.
#pragma once
#include "kernels/cuda/tensor_backward.cuh"

namespace attention_ops {

template <int Width, bool Extra>
struct QueriesShape : TensorShape<256, 4, 1, 16, Extra> {};
template <>
struct QueriesShape<64, false> : TensorShape<64, 4, 2, 64, false> {};
template <>
struct QueriesShape<64, true> : TensorShape<64, 8, 1, 64, true> {};
template <>
struct QueriesShape<128, false> : TensorShape<128, 4, 2, 32, false> {};
template <>
struct QueriesShape<128, true> : TensorShape<128, 8, 1, 32, true> {};

template <class S>
using QueriesMemory = BackwardMemory<S, S::kOwn, (S::kStep + 31) / 32>;

// What the lane's rows know.
template <int Count>
DEVICE void load_row_values(float (&values)[Count], const void* from, const Site& site, int first) {
#pragma unroll
  for (int h = 0; h < Count; ++h) {
    const int i = first + h * 8 + TensorLane().lane / 4;
    values[h] = i < site.of.queries ? device::load(static_cast<const float*>(from) + site.row_of(i)) : 0;
  }
}

template <class E, class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    tensor_queries_kernel(const __grid_constant__ Problem p, const __grid_constant__ BackwardInput in,
                          const __grid_constant__ Tensor4 grad_query, int tiles) {
  constexpr int kWidth = S::kWidth, M = S::kBlocks, N = S::kStep / 8;
  const TensorLane t;
  const QueriesMemory<S> memory;
  const Index bh = device::block() / tiles;
  const int query = (tiles - 1 - int(device::block() % tiles)) * S::kOwn, warp_row = t.warp * S::kWarpRows;
  const Site site{p, bh / p.heads, bh % p.heads, false};
  const AlignedRows<E> k(site.k(0)), v(site.v(0));
  const auto fetch = [&](int tile, int stage) {
    copy_tile<kWidth, S::kThreads, S::kStep>(memory.stage(stage, 0), k, tile * S::kStep);
    copy_tile<kWidth, S::kThreads, S::kStep>(memory.stage(stage, 1), v, tile * S::kStep);
  };
  VisibleTiles walk(int((p.keys + S::kStep - 1) / S::kStep),
                    [&](int n) { return site.cover(query, S::kOwn, n * S::kStep, S::kStep); });
  if (!walk.done()) {
    copy_tile<kWidth, S::kThreads, S::kOwn>(memory.own[0], AlignedRows<E>(site.q(0)), query);
    copy_tile<kWidth, S::kThreads, S::kOwn>(memory.own[1], AlignedRows<E>(Rows(in.grad_out, site.b, site.h, 0)), query);
    fetch(walk.tile(), 0);
  }
  device::commit_copies();
  float base[2 * M], delta[2 * M], dq[M][kWidth / 8][4];
  clear(dq);
  load_row_values(base, in.base, site, query + warp_row);
  load_row_values(delta, in.delta, site, query + warp_row);
  const DropoutStream stream = site.dropout();
  const float unit = score_unit<S>(p);
  const uint32_t q = left_operand<kWidth>(memory.own[0], warp_row, t.lane);
  const uint32_t grad_out = left_operand<kWidth>(memory.own[1], warp_row, t.lane);
  for (int n = 0; !walk.done(); ++n) {
    const int stage = n & 1;
    const TensorTile tile{site, query, walk.tile() * S::kStep, warp_row, !walk.whole(), S::kExtra && p.dropout.on()};
    walk.next();
    device::wait_for_copies();
    device::sync_threads();
    if (!walk.done()) fetch(walk.tile(), stage ^ 1);
    device::commit_copies();
    fill_tile_bits<S::kThreads>(memory, tile, stream, S::kOwn, S::kStep);
    if (in.inexact && (tile.some || p.adds()))
      check_finite<E, S::kThreads>(memory.stage(stage, 0), S::kStepBytes, in.inexact);

    float s[M][N][4], dp[M][N][4];
    clear(s), clear(dp);
    multiply_transposed<E, kWidth>(s, q, memory.stage(stage, 0), t.lane);
    multiply_transposed<E, kWidth>(dp, grad_out, memory.stage(stage, 1), t.lane);
    float slope[S::kExtra ? M : 1][S::kExtra ? N : 1][4];
    finish_products<false, E, S>(s, dp, slope, memory, tile);
    each_element<M, N>([&](int m, int c, int e) {
      const int h = 2 * m + e / 2;
      dp[m][c][e] = device::exp2_fast(s[m][c][e] * unit - base[h]) * (dp[m][c][e] - delta[h]);
    });
    apply_slope<S>(dp, slope, p);
    multiply<E, kWidth>(dq, dp, memory.stage(stage, 0), t.lane);
  }
  float factor[2 * M];
#pragma unroll
  for (int h = 0; h < 2 * M; ++h) factor[h] = float(p.scale);
  store_rows<E, kWidth, M>(memory.own[0], warp_row, t.lane, dq, factor,
                           AlignedRows<E>(Rows(grad_query, site.b, site.h, 0)), query);
}

}  // namespace attention_ops
