// Scores of a tile in log2 units, s[key][query]: product, softcap, bias, mask. Every pass computes them here.
#pragma once
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/problem.h"

namespace attention_ops {

// Buffers of a tile, [kTileKeys, panel width] each.
template <class T>
struct ScoreTile {
  T* s = nullptr;
  T* bias = nullptr;              // where the problem has one
  T* slope = nullptr;             // d softcap(x) / dx, for backward passes of problems with a softcap
  LaneInt<T>* visible = nullptr;  // valid where the tile's cover is `some`

  void take(Pieces& pieces, const Problem<T>& p, int width, bool backward) {
    const Index size = Index(kTileKeys) * width;
    pieces(s, size);
    pieces(visible, size);
    if (p.bias.defined()) pieces(bias, size);
    if (backward && p.softcap > 0) pieces(slope, size);
  }
};

template <class T, int Width>
void load_bias(T* out, const Site<T>& site, Index row, int rows, Index key, int keys) {
  const Tensor4& bias = site.of.bias;
  with_element(bias.element, [&]<class E>(E*) {
    const E* data = static_cast<const E*>(bias.data) + site.b * bias.strides[0] + site.h * bias.strides[1] +
                    row * bias.strides[2] + key * bias.strides[3];
    for (int q = 0; q < Width; ++q) {
      const E* line = data + std::min(q, rows - 1) * bias.strides[2];
      for (int k = 0; k < keys; ++k) out[k * Width + q] = convert<T>(line[k * bias.strides[3]]) * kLog2e<T>;
    }
  });
}

// A bias of minus infinity hides its place; the cover and the lanes learn of it.
template <class T, int Width>
Cover hide_infinite_bias(const T* bias, LaneInt<T>* visible, Cover cover, int keys) {
  Ints<T> infinite{};
  for (Index n = 0; n < Index(keys) * Width; n += kLanes<T>) infinite |= load(bias + n) == splat(-kInfinity<T>);
  if (!any(infinite)) return cover;
  Ints<T> some{};
  for (Index n = 0; n < Index(keys) * Width; n += kLanes<T>) {
    const Ints<T> before = cover == Cover::all ? ~Ints<T>{} : load_lanes<T>(visible + n);
    const Ints<T> after = before & ~(load(bias + n) == splat(-kInfinity<T>));
    std::memcpy(visible + n, &after, sizeof after);
    some |= after;
  }
  return any(some) ? Cover::some : Cover::none;
}

template <class T, int NV>
Cover find_cover(const ScoreTile<T>& tile, const Site<T>& site, const Panel<T, NV>& panel, Index key, int keys) {
  constexpr int kWidth = Panel<T, NV>::kWidth;
  Cover cover = site.mask.cover(panel.tile(key, keys));
  if (cover == Cover::some) cover = site.mask.template fill<kWidth>(panel.tile(key, keys), tile.visible);
  if (cover == Cover::none || !site.of.bias.defined()) return cover;
  load_bias<T, kWidth>(tile.bias, site, panel.first, panel.count, key, keys);
  return hide_infinite_bias<T, kWidth>(tile.bias, tile.visible, cover, keys);
}

template <class T, int Width>
void apply_softcap(const ScoreTile<T>& tile, const Problem<T>& p, int keys) {
  const Vec<T> unit = splat(p.softcap * kLog2e<T>);
  for (Index n = 0; n < Index(keys) * Width; n += kLanes<T>) {
    const Vec<T> t = tanh<T>(load(tile.s + n));
    store(tile.s + n, p.bias.defined() ? fma(t, unit, load(tile.bias + n)) : t * unit);
    if (tile.slope) store(tile.slope + n, splat(T(1)) - t * t);
  }
}

// False for a tile without a visible element, which is then left alone.
template <class T, int R, int NV>
Cover compute_scores(const ScoreTile<T>& tile, const Site<T>& site, const Panel<T, NV>& panel, Index key, int keys) {
  constexpr int kWidth = Panel<T, NV>::kWidth;
  const Problem<T>& p = site.of;
  const Cover cover = find_cover(tile, site, panel, key, keys);
  if (cover == Cover::none) return cover;
  const bool starts_at_bias = p.bias.defined() && p.softcap == 0;
  each_row_tile<R>(keys, [&](auto rows, Index r) {
    Accumulators<T, rows, NV> acc{};
    if (starts_at_bias)
      each<T, rows, NV>(acc, [&](Vec<T>& x, int i, int v) { x = load(tile.bias + (r + i) * kWidth + v * kLanes<T>); });
    multiply_rows<T, rows, NV>(acc, site.k + (key + r) * p.k.row_stride, p.k.row_stride, panel.q_t, kWidth, p.width);
    each<T, rows, NV>(acc, [&](Vec<T>& x, int i, int v) { store(tile.s + (r + i) * kWidth + v * kLanes<T>, x); });
  });
  if (p.softcap > 0) apply_softcap<T, kWidth>(tile, p, keys);
  if (cover == Cover::some)
    for (Index n = 0; n < Index(keys) * kWidth; n += kLanes<T>)
      store(tile.s + n, load_lanes<T>(tile.visible + n) ? load(tile.s + n) : splat(-kInfinity<T>));
  return cover;
}

// keep[key][lane] = -1 where dropout keeps the element, else 0.
template <class T, int NV>
void fill_kept(LaneInt<T>* keep, const Site<T>& site, const Panel<T, NV>& panel, Index key, int keys) {
  constexpr int kWidth = Panel<T, NV>::kWidth;
  for (Index group = key / 8; group <= (key + keys - 1) / 8; ++group) {
    uint32_t words[4][kWidth];
    for (int q = 0; q < kWidth; ++q) {
      const Philox bits = site.dropout.eight(uint32_t(panel.first + q), uint32_t(group));
      for (int w = 0; w < 4; ++w) words[w][q] = bits.word[w];
    }
    for (int n = 0; n < 8; ++n) {
      const Index k = group * 8 + n - key;
      if (k < 0 || k >= keys) continue;
      for (int q = 0; q < kWidth; ++q)
        keep[k * kWidth + q] = -LaneInt<T>(((words[n / 2][q] >> (16 * (n % 2))) & 0xffff) >= site.dropout.threshold);
    }
  }
}

// x = keep ? factor * x : 0
template <class T, int Width>
void apply_kept(T* x, const LaneInt<T>* keep, T factor, int keys) {
  for (Index n = 0; n < Index(keys) * Width; n += kLanes<T>)
    store(x + n, load_lanes<T>(keep + n) ? splat(factor) * load(x + n) : Vec<T>{});
}

// Whether no element of `rows` rows is infinite or NaN. Masked places may hold anything, and 0 times it is NaN.
template <class T>
bool all_finite(const T* x, Index row_stride, Index rows, Index width) {
  T sum = 0;
  for (Index r = 0; r < rows; ++r)
    for (Index c = 0; c < width; ++c) sum += x[r * row_stride + c] * 0;
  return sum == 0;
}

}  // namespace attention_ops
