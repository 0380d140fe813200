// Backward on tensor cores, the keys' side: a block owns a tile of keys, walks over the visible tiles of the queries of
// all heads of its group, and sums dk and dv. No head's sum meets another's outside of a block, so nothing is atomic.
#pragma once
#include "kernels/cuda/tensor_backward.cuh"

namespace attention_ops {

// Wide rows leave room for the sums of dk or of dv, not of both.
enum class Wanted { both, key, value };

template <int Width, bool Extra>
struct KeysShape : TensorShape<256, 4, 1, 16, Extra> {};
template <>
struct KeysShape<64, false> : TensorShape<64, 4, 2, 32, false> {};
template <>
struct KeysShape<64, true> : TensorShape<64, 8, 1, 32, true> {};
template <bool Extra>
struct KeysShape<128, Extra> : TensorShape<128, 8, 1, 32, Extra> {};

template <class S>
using KeysMemory = BackwardMemory<S, S::kStep, S::kOwn / 32>;

// Begins to copy a tile of queries, and fetches what their rows know.
template <class E, class S>
DEVICE void fetch_queries(const KeysMemory<S>& memory, const BackwardInput& in, const Site& site, int query,
                          int stage) {
  copy_tile<S::kWidth, S::kThreads, S::kStep>(memory.stage(stage, 0), AlignedRows<E>(site.q(0)), query);
  copy_tile<S::kWidth, S::kThreads, S::kStep>(memory.stage(stage, 1),
                                              AlignedRows<E>(Rows(in.grad_out, site.b, site.h, 0)), query);
  if (device::thread() >= 2 * S::kStep) return;
  const int i = device::thread() % S::kStep, which = device::thread() / S::kStep;
  const float* values = static_cast<const float*>(which ? in.delta : in.base);
  memory.row_values[(2 * stage + which) * S::kStep + i] =
      query + i < site.of.queries ? device::load(values + site.row_of(query + i)) : 0.f;
}

// s := p and dp := ds, rows are keys
template <class S, int M, int N>
DEVICE void find_gradient(float (&s)[M][N][4], float (&dp)[M][N][4], const KeysMemory<S>& memory, int stage,
                          float unit) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int query = n * 8 + TensorLane().column(i);
      const float base = memory.row_values[2 * stage * S::kStep + query];
      const float delta = memory.row_values[(2 * stage + 1) * S::kStep + query];
#pragma unroll
      for (int h = 0; h < 2 * M; ++h) {
        float &x = s[h / 2][n][h % 2 * 2 + i], &y = dp[h / 2][n][h % 2 * 2 + i];
        x = device::exp2_fast(x * unit - base), y = x * (y - delta);
      }
    }
}

template <class E, class S, int M>
DEVICE void store_keys(const KeysMemory<S>& memory, const float (&x)[M][S::kWidth / 8][4], float factor, const Rows& to,
                       int key) {
  const TensorLane t;
  float factors[2 * M];
#pragma unroll
  for (int h = 0; h < 2 * M; ++h) factors[h] = factor;
  store_rows<E, S::kWidth, M>(memory.own[0], t.warp * S::kWarpRows, t.lane, x, factors, AlignedRows<E>(to), key);
}

template <class E, class S, Wanted W>
__global__ void __launch_bounds__(S::kThreads, 1)
    tensor_keys_kernel(const __grid_constant__ Problem p, const __grid_constant__ BackwardInput in,
                       const __grid_constant__ BackwardResult result, int tiles) {
  constexpr int kWidth = S::kWidth, M = S::kBlocks, N = S::kStep / 8;
  constexpr bool kKey = W != Wanted::value, kValue = W != Wanted::key;
  const TensorLane t;
  const KeysMemory<S> memory;
  const Index bh = device::block() / tiles, b = bh / p.key_heads, key_head = bh % p.key_heads;
  const int key = int(device::block() % tiles) * S::kOwn, warp_row = t.warp * S::kWarpRows;
  const int row_tiles = int((p.queries + S::kStep - 1) / S::kStep);
  // Tile n of the walk: a tile of queries of a head of the group.
  const auto site_of = [&](int n) { return Site{p, b, key_head * p.group() + n / row_tiles, false}; };
  const auto query_of = [&](int n) { return n % row_tiles * S::kStep; };
  const auto fetch = [&](int n, int stage) { fetch_queries<E, S>(memory, in, site_of(n), query_of(n), stage); };
  VisibleTiles walk(int(p.group()) * row_tiles,
                    [&](int n) { return site_of(n).cover(query_of(n), S::kStep, key, S::kOwn); });
  if (!walk.done()) {
    copy_tile<kWidth, S::kThreads, S::kOwn>(memory.own[0], AlignedRows<E>(site_of(0).k(0)), key);
    if constexpr (kKey) copy_tile<kWidth, S::kThreads, S::kOwn>(memory.own[1], AlignedRows<E>(site_of(0).v(0)), key);
    fetch(walk.tile(), 0);
  }
  device::commit_copies();
  float dk[kKey ? M : 1][kKey ? kWidth / 8 : 1][4], dv[kValue ? M : 1][kValue ? kWidth / 8 : 1][4];
  clear(dk), clear(dv);
  DropoutStream stream = site_of(0).dropout();
  const float unit = score_unit<S>(p);
  const uint32_t k = left_operand<kWidth>(memory.own[0], warp_row, t.lane);
  const uint32_t v = left_operand<kWidth>(memory.own[1], warp_row, t.lane);
  for (int n = 0; !walk.done(); ++n) {
    const int stage = n & 1;
    const Site site = site_of(walk.tile());
    const TensorTile tile{site, query_of(walk.tile()), key, warp_row, !walk.whole(), S::kExtra && p.dropout.on()};
    stream.head = uint32_t(site.h);
    walk.next();
    device::wait_for_copies();
    device::sync_threads();
    if (!walk.done()) fetch(walk.tile(), stage ^ 1);
    device::commit_copies();
    fill_tile_bits<S::kThreads>(memory, tile, stream, S::kStep, S::kOwn);
    if (in.inexact && (tile.some || p.adds()))
      check_finite<E, S::kThreads>(memory.stage(stage, 0), 2 * S::kStepBytes, in.inexact);

    float s[M][N][4], dp[M][N][4];  // rows are keys, columns are queries
    clear(s), clear(dp);
    multiply_transposed<E, kWidth>(s, k, memory.stage(stage, 0), t.lane);
    if constexpr (kKey) multiply_transposed<E, kWidth>(dp, v, memory.stage(stage, 1), t.lane);
    float slope[S::kExtra ? M : 1][S::kExtra ? N : 1][4];
    finish_products<true, E, S>(s, dp, slope, memory, tile);
    find_gradient<S>(s, dp, memory, stage, unit);
    apply_slope<S>(dp, slope, p);
    drop_gradient<true, S>(s, memory, tile);
    if constexpr (kValue) multiply<E, kWidth>(dv, s, memory.stage(stage, 1), t.lane);
    if constexpr (kKey) multiply<E, kWidth>(dk, dp, memory.stage(stage, 0), t.lane);
  }
  // Sums leave through the owned rows, of which a warp has read its own alone.
  if constexpr (kKey) store_keys<E, S>(memory, dk, float(p.scale), Rows(result.grad_key, b, key_head, 0), key);
  if constexpr (kValue) store_keys<E, S>(memory, dv, 1, Rows(result.grad_value, b, key_head, 0), key);
}

}  // namespace attention_ops
