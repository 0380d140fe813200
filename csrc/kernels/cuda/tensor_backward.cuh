// What both backward passes on tensor cores share: from products to the gradient of scores. In both passes the owned
// rows are the left side of every product, so weights and their gradients go from sums straight into the next operand.
//   p = 2^(s - base),  dp = do v',  ds = p (dp - delta),  dv = p' do,  dk = ds' q,  dq = ds k
#pragma once
#include "kernels/cuda/tensor_tile.cuh"

namespace attention_ops {

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

// x := factor x where dropout keeps the place, else 0
template <bool Transposed, class S, class Memory, int M, int N>
DEVICE void drop_gradient(float (&x)[M][N][4], const Memory& memory, const TensorTile& tile) {
  if (!tile.drops) return;
  const float factor = float(tile.site.of.dropout.scale);
  each_element<M, N>([&](int m, int n, int e) { x[m][n][e] *= factor; });
  each_unset<Transposed, Memory::kWords, M, N>(memory.kept, tile.warp_row,
                                               [&](int m, int n, int e) { x[m][n][e] = 0; });
}

// From the products s and dp of a tile to its scores and to the gradient of its weights: hidden scores become minus
// infinity and their dp 0, since what is hidden may be anything.
template <bool Transposed, class E, class S, class Memory, int M, int N, int SlopeM, int SlopeN>
DEVICE void finish_products(float (&s)[M][N][4], float (&dp)[M][N][4], float (&slope)[SlopeM][SlopeN][4],
                            const Memory& memory, const TensorTile& tile) {
  if constexpr (S::kExtra) finish_scores<Transposed, E>(s, slope, tile, [&](int m, int n, int e) { dp[m][n][e] = 0; });
  if (tile.some)
    each_unset<Transposed, Memory::kWords, M, N>(
        memory.visible, tile.warp_row, [&](int m, int n, int e) { s[m][n][e] = -kInfinity<float>, dp[m][n][e] = 0; });
  drop_gradient<Transposed, S>(dp, memory, tile);
}

// A hidden place, whose ds is 0, may have any slope.
template <class S, int M, int N, int SlopeM, int SlopeN>
DEVICE void apply_slope(float (&ds)[M][N][4], const float (&slope)[SlopeM][SlopeN][4], const Problem& p) {
  if constexpr (S::kExtra)
    if (p.softcap > 0)
      each_element<M, N>(
          [&](int m, int n, int e) { ds[m][n][e] = ds[m][n][e] == 0 ? 0 : ds[m][n][e] * slope[m][n][e]; });
}

}  // namespace attention_ops
