// Backward on tensor cores, in two passes without atomics: keys' side (dk and dv) and queries' side (dq). In both the
// owned rows are the left side of every product, so weights and their gradients go from sums straight into the next
// operand. p = 2^(s - base),  dp = do v',  ds = p (dp - delta),  dv = p' do,  dk = ds' q,  dq = ds k
#pragma once
#include "kernels/cuda/tensor_tile.cuh"

namespace attention_ops {

// --- queries' side ---

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

// Shared memory, in bytes: the owned rows of two tensors, two stages of two others, the bits of a tile [rows][words].
template <class S, int Rows, int Words>
struct BackwardMemory {
  static constexpr int kWords = Words;
  static constexpr int kBits = Rows * Words * 4, kStages = 2 * S::kOwnBytes;
  static constexpr int kVisible = kStages + 4 * S::kStepBytes, kKept = kVisible + kBits;
  static constexpr int kRowValues = kKept + (S::kExtra ? kBits : 0);  // [stage][base, delta][step]
  static constexpr int kBytes = kRowValues + 4 * S::kStep * 4;

  uint32_t own[2] = {device::shared_address(0), device::shared_address(S::kOwnBytes)};
  DEVICE uint32_t stage(int n, int which) const {
    return device::shared_address(kStages + (2 * n + which) * S::kStepBytes);
  }
  device::Shared<uint32_t> visible = device::shared<uint32_t>(kVisible), kept = device::shared<uint32_t>(kKept);
  device::Shared<float> row_values = device::shared<float>(kRowValues);
};

template <class S>
using QueriesMemory = BackwardMemory<S, S::kOwn, (S::kStep + 31) / 32>;

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
#pragma unroll
  for (int h = 0; h < 2 * M; ++h) {
    const int i = query + warp_row + h * 8 + t.lane / 4;
    base[h] = i < p.queries ? device::load(static_cast<const float*>(in.base) + site.row_of(i)) : 0;
    delta[h] = i < p.queries ? device::load(static_cast<const float*>(in.delta) + site.row_of(i)) : 0;
  }
  const TensorScores<E> scores{p};
  const DropoutStream stream = site.dropout();
  const float unit = scores.unit(S::kExtra), kept_factor = float(p.dropout.scale());
  const bool drops = S::kExtra && p.dropout.on();
  const uint32_t q = left_operand<kWidth>(memory.own[0], warp_row, t.lane);
  const uint32_t grad_out = left_operand<kWidth>(memory.own[1], warp_row, t.lane);
  for (int n = 0; !walk.done(); ++n) {
    const int stage = n & 1, key = walk.tile() * S::kStep;
    const bool some = !walk.whole();
    walk.next();
    device::wait_for_copies();
    device::sync_threads();
    if (!walk.done()) fetch(walk.tile(), stage ^ 1);
    device::commit_copies();
    fill_tile_bits<S::kThreads>(memory, site, stream, some, drops, query, S::kOwn, key, S::kStep);
    if (in.inexact && (some || p.bias.defined()))
      check_finite<E, S::kThreads>(memory.stage(stage, 0), S::kStepBytes, in.inexact);

    float s[M][N][4], dp[M][N][4];
    clear(s), clear(dp);
    multiply_transposed<E, kWidth>(s, q, memory.stage(stage, 0), t.lane);
    multiply_transposed<E, kWidth>(dp, grad_out, memory.stage(stage, 1), t.lane);
    [[maybe_unused]] float slope[S::kExtra ? M : 1][S::kExtra ? N : 1][4];
    if constexpr (S::kExtra) {
      const auto place = [&](int m, int c, int e, int& i, int& j) {
        i = query + warp_row + m * 16 + t.row(e), j = key + c * 8 + t.column(e);
      };
      scores.finish(s, slope, site, place, [&](int m, int c, int e) { dp[m][c][e] = 0; });
    }
    if (some)
      each_unset<memory.kWords, M, N>(memory.visible, warp_row, t,
                                      [&](int m, int c, int e) { s[m][c][e] = -kInfinity<float>, dp[m][c][e] = 0; });
    if (drops) {
      each_element<M, N>([&](int m, int c, int e) { dp[m][c][e] *= kept_factor; });
      each_unset<memory.kWords, M, N>(memory.kept, warp_row, t, [&](int m, int c, int e) { dp[m][c][e] = 0; });
    }
    each_element<M, N>([&](int m, int c, int e) {
      const int h = 2 * m + e / 2;
      dp[m][c][e] = device::exp2_fast(s[m][c][e] * unit - base[h]) * (dp[m][c][e] - delta[h]);
    });
    if constexpr (S::kExtra) {
      if (p.softcap > 0) each_element<M, N>([&](int m, int c, int e) { dp[m][c][e] *= slope[m][c][e]; });
    }
    multiply<E, kWidth>(dq, dp, memory.stage(stage, 0), t.lane);
  }
  float factor[2 * M];
#pragma unroll
  for (int h = 0; h < 2 * M; ++h) factor[h] = float(p.scale);
  store_rows<E, kWidth, M>(memory.own[0], warp_row, t.lane, dq, factor,
                           AlignedRows<E>(Rows(grad_query, site.b, site.h, 0)), query);
}

// --- keys' side ---

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
  const auto fetch = [&](int n, int stage) {
    const Site site = site_of(n);
    const int query = query_of(n);
    copy_tile<kWidth, S::kThreads, S::kStep>(memory.stage(stage, 0), AlignedRows<E>(site.q(0)), query);
    copy_tile<kWidth, S::kThreads, S::kStep>(memory.stage(stage, 1),
                                             AlignedRows<E>(Rows(in.grad_out, site.b, site.h, 0)), query);
    if (device::thread() < 2 * S::kStep) {
      const int i = device::thread() % S::kStep, which = device::thread() / S::kStep;
      const float* values = static_cast<const float*>(which ? in.delta : in.base);
      memory.row_values[(2 * stage + which) * S::kStep + i] =
          query + i < p.queries ? device::load(values + site.row_of(query + i)) : 0.f;
    }
  };
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
  const TensorScores<E> scores{p};
  DropoutStream stream = site_of(0).dropout();
  const float unit = scores.unit(S::kExtra), kept_factor = float(p.dropout.scale());
  const bool drops = S::kExtra && p.dropout.on();
  const uint32_t k = left_operand<kWidth>(memory.own[0], warp_row, t.lane);
  const uint32_t v = left_operand<kWidth>(memory.own[1], warp_row, t.lane);
  for (int n = 0; !walk.done(); ++n) {
    const int stage = n & 1, query = query_of(walk.tile());
    const bool some = !walk.whole();
    const Site site = site_of(walk.tile());
    stream.head = uint32_t(site.h);
    walk.next();
    device::wait_for_copies();
    device::sync_threads();
    if (!walk.done()) fetch(walk.tile(), stage ^ 1);
    device::commit_copies();
    fill_tile_bits<S::kThreads>(memory, site, stream, some, drops, query, S::kStep, key, S::kOwn);
    if (in.inexact && (some || p.bias.defined()))
      check_finite<E, S::kThreads>(memory.stage(stage, 0), 2 * S::kStepBytes, in.inexact);

    float s[M][N][4], dp[M][N][4];  // rows are keys, columns are queries
    clear(s), clear(dp);
    multiply_transposed<E, kWidth>(s, k, memory.stage(stage, 0), t.lane);
    if constexpr (kKey) multiply_transposed<E, kWidth>(dp, v, memory.stage(stage, 1), t.lane);
    [[maybe_unused]] float slope[S::kExtra ? M : 1][S::kExtra ? N : 1][4];
    if constexpr (S::kExtra) {
      const auto place = [&](int m, int c, int e, int& i, int& j) {
        i = query + c * 8 + t.column(e), j = key + warp_row + m * 16 + t.row(e);
      };
      scores.finish(s, slope, site, place, [&](int m, int c, int e) { dp[m][c][e] = 0; });
    }
    if (some)
      each_unset_transposed<memory.kWords, M, N>(
          memory.visible, warp_row, t, [&](int m, int c, int e) { s[m][c][e] = -kInfinity<float>, dp[m][c][e] = 0; });
    if (drops) {
      each_element<M, N>([&](int m, int c, int e) { dp[m][c][e] *= kept_factor; });
      each_unset_transposed<memory.kWords, M, N>(memory.kept, warp_row, t,
                                                 [&](int m, int c, int e) { dp[m][c][e] = 0; });
    }
#pragma unroll
    for (int c = 0; c < N; ++c)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float base = memory.row_values[2 * stage * S::kStep + c * 8 + t.column(i)];
        const float delta = memory.row_values[(2 * stage + 1) * S::kStep + c * 8 + t.column(i)];
#pragma unroll
        for (int h = 0; h < 2 * M; ++h) {
          float &x = s[h / 2][c][h % 2 * 2 + i], &y = dp[h / 2][c][h % 2 * 2 + i];
          x = device::exp2_fast(x * unit - base), y = x * (y - delta);
        }
      }
    if constexpr (S::kExtra) {
      if (p.softcap > 0) each_element<M, N>([&](int m, int c, int e) { dp[m][c][e] *= slope[m][c][e]; });
    }
    if (drops) {
      each_element<M, N>([&](int m, int c, int e) { s[m][c][e] *= kept_factor; });
      each_unset_transposed<memory.kWords, M, N>(memory.kept, warp_row, t,
                                                 [&](int m, int c, int e) { s[m][c][e] = 0; });
    }
    if constexpr (kValue) multiply<E, kWidth>(dv, s, memory.stage(stage, 1), t.lane);
    if constexpr (kKey) multiply<E, kWidth>(dk, dp, memory.stage(stage, 0), t.lane);
  }
  device::sync_threads();  // every warp has read the owned rows, through which sums now leave
  float factor[2 * M], one[2 * M];
#pragma unroll
  for (int h = 0; h < 2 * M; ++h) factor[h] = float(p.scale), one[h] = 1;
  if constexpr (kKey)
    store_rows<E, kWidth, M>(memory.own[0], warp_row, t.lane, dk, factor,
                             AlignedRows<E>(Rows(result.grad_key, b, key_head, 0)), key);
  if constexpr (kValue)
    store_rows<E, kWidth, M>(memory.own[0], warp_row, t.lane, dv, one,
                             AlignedRows<E>(Rows(result.grad_value, b, key_head, 0)), key);
}

}  // namespace attention_ops
