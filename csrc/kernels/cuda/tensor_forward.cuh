// Forward on tensor cores: a block owns a tile of queries and walks over the visible tiles of keys. Scores, softmax and
// weights stay in registers; keys and values arrive by asynchronous copies in two stages, one barrier for each tile.
//   s = scale q k',  m' = max(m, s),  p = 2^(s - m'),  l = alpha l + sum p,  o = alpha o + p v,  alpha = 2^(m - m')
#pragma once
#include "kernels/cuda/tensor_tile.cuh"

namespace attention_ops {

template <int Width, bool Extra>
struct ForwardShape : TensorShape<256, 4, 1, 32, Extra> {};
template <>
struct ForwardShape<64, false> : TensorShape<64, 4, 2, 64, false> {};
template <>
struct ForwardShape<64, true> : TensorShape<64, 8, 1, 64, true> {};
template <>
struct ForwardShape<128, false> : TensorShape<128, 4, 2, 32, false> {};
template <>
struct ForwardShape<128, true> : TensorShape<128, 8, 1, 32, true> {};

// Where a block may have as much shared memory (192 KB), wide rows are faster so.
using WideForwardShape = TensorShape<256, 8, 1, 64, false>;

// Shared memory, in bytes: queries, two stages of keys and values, the bits of a tile.
template <class S>
struct ForwardMemory {
  static constexpr int kWords = S::kStep / 32, kBits = S::kOwn * kWords * 4;
  static constexpr int kStages = S::kOwnBytes, kVisible = kStages + 4 * S::kStepBytes;
  static constexpr int kKept = kVisible + kBits, kBytes = kKept + (S::kExtra ? kBits : 0);

  uint32_t q = device::shared_address(0);
  DEVICE uint32_t k(int stage) const { return device::shared_address(kStages + 2 * stage * S::kStepBytes); }
  DEVICE uint32_t v(int stage) const { return k(stage) + S::kStepBytes; }
  device::Shared<uint32_t> visible = device::shared<uint32_t>(kVisible), kept = device::shared<uint32_t>(kKept);
};

// The running softmax of a lane's rows; the four lanes of a quad hold a row between them.
template <int M>
struct TensorRows {
  float m[2 * M], l[2 * M];

  DEVICE explicit TensorRows(float sink) {
#pragma unroll
    for (int h = 0; h < 2 * M; ++h) m[h] = sink, l[h] = device::thread() % 4 == 0 && sink != -kInfinity<float>;
  }

  // s := p; scores are s * unit in log2 units, unit > 0. Returns alpha. Differences come before the products: a product
  // that becomes one operation with the subtraction after it keeps what rounding took off the base, which for a huge
  // score is a huge exponent.
  template <int N>
  DEVICE float update(float (&s)[N][4], int h, float unit) {
    const int e = h % 2 * 2;
    float top = m[h];
#pragma unroll
    for (int n = 0; n < N; ++n) top = fmaxf(top, fmaxf(s[n][e], s[n][e + 1]));
    top = fmaxf(top, device::shuffle_xor(top, 1));
    top = fmaxf(top, device::shuffle_xor(top, 2));
    const float base = top == -kInfinity<float> ? 0 : top;  // nothing visible yet
    const float alpha = m[h] == top ? 1 : device::exp2_fast((m[h] - base) * unit);
    float sum = 0;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = e; i < e + 2; ++i) sum += s[n][i] = device::exp2_fast((s[n][i] - base) * unit);
    m[h] = top;
    l[h] = l[h] * alpha + sum;
    return alpha;
  }
};

// o / l and lse = m + log l, to their places; out goes through the tile of the queries.
template <class E, class S, int M>
DEVICE void finish_forward(const Site& site, const ForwardResult& result, const TensorRows<M>& rows,
                           const float (&o)[M][S::kWidth / 8][4], int query, float unit, uint32_t tile) {
  const TensorLane t;
  const float kept = float(site.of.dropout.scale);
  float factor[2 * M];
#pragma unroll
  for (int h = 0; h < 2 * M; ++h) {
    float l = rows.l[h];
    l += device::shuffle_xor(l, 1);
    l += device::shuffle_xor(l, 2);
    factor[h] = l == 0 ? 0 : kept / l;
    const int i = query + t.warp * S::kWarpRows + h * 8 + t.lane / 4;
    const float lse = l == 0 ? -kInfinity<float> : (rows.m[h] * unit + device::log2(l)) * kLn2<float>;
    if (t.lane % 4 == 0 && i < site.of.queries) device::store(static_cast<float*>(result.lse) + site.row_of(i), lse);
  }
  store_rows<E, S::kWidth, M>(tile, t.warp * S::kWarpRows, t.lane, o, factor,
                              AlignedRows<E>(Rows(result.out, site.b, site.h, 0)), query);
}

template <class E, class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    tensor_forward_kernel(const __grid_constant__ Problem p, const __grid_constant__ ForwardResult result, int tiles,
                          int* inexact) {
  constexpr int kWidth = S::kWidth, M = S::kBlocks, N = S::kStep / 8;
  constexpr bool kHeld = kWidth * M <= 128;  // the queries fit into registers
  const TensorLane t;
  const ForwardMemory<S> memory;
  const Index bh = device::block() / tiles;
  const int query = (tiles - 1 - int(device::block() % tiles)) * S::kOwn;  // the longest of a causal mask first
  const int warp_row = t.warp * S::kWarpRows;
  const Site site{p, bh / p.heads, bh % p.heads, false};
  const AlignedRows<E> k(site.k(0)), v(site.v(0));
  const auto fetch = [&](int tile, int stage) {
    copy_tile<kWidth, S::kThreads, S::kStep>(memory.k(stage), k, tile * S::kStep);
    copy_tile<kWidth, S::kThreads, S::kStep>(memory.v(stage), v, tile * S::kStep);
  };
  VisibleTiles walk(int((p.keys + S::kStep - 1) / S::kStep),
                    [&](int n) { return site.cover(query, S::kOwn, n * S::kStep, S::kStep); });
  if (!walk.done()) {
    copy_tile<kWidth, S::kThreads, S::kOwn>(memory.q, AlignedRows<E>(site.q(0)), query);
    fetch(walk.tile(), 0);
  }
  device::commit_copies();

  const DropoutStream stream = site.dropout();
  const float unit = score_unit<S>(p);
  const uint32_t q = left_operand<kWidth>(memory.q, warp_row, t.lane);
  HeldOperand<kHeld ? kWidth : 16, M> held;
  TensorRows<M> rows(S::kExtra ? site.sink<float>() : -kInfinity<float>);
  float o[M][kWidth / 8][4];
  clear(o);
  for (int n = 0; !walk.done(); ++n) {
    const int stage = n & 1;
    const TensorTile tile{site, query, walk.tile() * S::kStep, warp_row, !walk.whole(), S::kExtra && p.dropout.on()};
    walk.next();
    device::wait_for_copies();
    device::sync_threads();
    if (!walk.done()) fetch(walk.tile(), stage ^ 1);
    device::commit_copies();
    fill_tile_bits<S::kThreads>(memory, tile, stream, S::kOwn, S::kStep);
    if (inexact && (tile.some || p.adds())) check_finite<E, S::kThreads>(memory.v(stage), S::kStepBytes, inexact);

    float s[M][N][4];
    clear(s);
    if constexpr (kHeld) {
      if (n == 0) held.load(q);
      multiply_transposed<E, kWidth>(
          s,
          [&](int c, int m, uint32_t (&fragment)[4]) {
#pragma unroll
            for (int i = 0; i < 4; ++i) fragment[i] = held.fragments[c][m][i];
          },
          memory.k(stage), t.lane);
    } else {
      multiply_transposed<E, kWidth>(s, q, memory.k(stage), t.lane);
    }
    if constexpr (S::kExtra) {
      float slope[M][N][4];
      finish_scores<false, E>(s, slope, tile, [](int, int, int) {});
    }
    if (tile.some)
      each_unset<false, memory.kWords, M, N>(memory.visible, warp_row,
                                             [&](int m, int c, int e) { s[m][c][e] = -kInfinity<float>; });
#pragma unroll
    for (int h = 0; h < 2 * M; ++h) {
      const float alpha = rows.update(s[h / 2], h, unit);
#pragma unroll
      for (int d = 0; d < kWidth / 8; ++d) o[h / 2][d][h % 2 * 2] *= alpha, o[h / 2][d][h % 2 * 2 + 1] *= alpha;
    }
    if (tile.drops)  // after they have been counted in the sum
      each_unset<false, memory.kWords, M, N>(memory.kept, warp_row, [&](int m, int c, int e) { s[m][c][e] = 0; });
    multiply<E, kWidth>(o, s, memory.v(stage), t.lane);
  }
  finish_forward<E, S>(site, result, rows, o, query, unit, memory.q);
}

}  // namespace attention_ops
