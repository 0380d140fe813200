// How scores move when the inputs move along their tangents. A dot marks a tangent:
//   x_dot = scale (q_dot k' + q k_dot'),  s_dot = softcap'(x) x_dot + bias_dot
#pragma once
#include "kernels/cpu/score.h"

namespace attention_ops {

// Of the inputs of a problem, laid out as they are; what does not move has none.
template <class T>
struct Tangents {
  Matrices<const T> q, k, v;
  Tensor4 bias;
  const T* sinks = nullptr;  // [H]
  const T* lse = nullptr;    // [B, H, Lq], where it is given: to weights, and to backward passes
};

// Of the scores of a tile, [kTileKeys, panel width], not in log2 units. Unlike scores they are linear: a masked place
// may hold anything, and who reads it must leave it out.
template <class T>
struct TangentTile {
  T* s = nullptr;
  T* bias = nullptr;  // where it moves
  T* x = nullptr;     // x_dot / softcap, where there is one and a second derivative needs it

  void take(Pieces& pieces, const Problem<T>& p, const Tangents<T>& along, int width, bool second) {
    const Index size = Index(kTileKeys) * width;
    pieces(s, size);
    if (along.bias.defined()) pieces(bias, size);
    if (second && p.softcap > 0) pieces(x, size);
  }
};

template <class T, int NV>
void span_tangents(const TangentTile<T>& dot, const ScoreTile<T>& tile, const Site<T>& site, const Panel<T>& panel,
                   const Tangents<T>& along, const T* q_dot_t, Index key, const Span& span) {
  constexpr int kWidth = Panel<T>::kWidth, kStep = kLanes<T>;
  const Problem<T>& p = site.of;
  const int lane = span.vector * kStep;
  const Index first = key + span.key, kv = site.h / p.group();
  const T* k = site.k + first * p.k.row_stride;
  const T* k_dot = along.k.data ? along.k.at(site.b, kv) + first * along.k.row_stride : nullptr;
  const Vec<T> unit = splat(p.softcap > 0 ? p.softcap : kLn2<T>);  // what query_factor() divides by
  each_row_tile<kTileRows<NV>>(span.keys, [&](auto rows, Index r) {
    Accumulators<T, rows, NV> acc{};
    if (q_dot_t)
      multiply_rows<T, rows, NV>(acc, k + r * p.k.row_stride, p.k.row_stride, q_dot_t + lane, kWidth, p.width);
    if (k_dot)
      multiply_rows<T, rows, NV>(acc, k_dot + r * along.k.row_stride, along.k.row_stride, panel.q_t + lane, kWidth,
                                 p.width);
    each<T, rows, NV>(acc, [&](Vec<T>& x, int i, int v) {
      const Index n = (span.key + r + i) * kWidth + lane + v * kStep;
      Vec<T> s = x * unit;
      if (tile.tanh) s *= splat(T(1)) - load(tile.tanh + n) * load(tile.tanh + n);
      if (dot.bias) s += load(dot.bias + n);
      store(dot.s + n, s);
      if (dot.x) store(dot.x + n, x);
    });
  });
}

// Fills the tangents of a tile whose scores are known; q_dot_t is a panel like q_t.
template <class T>
void compute_tangents(const TangentTile<T>& dot, const ScoreTile<T>& tile, const Site<T>& site, const Panel<T>& panel,
                      const Tangents<T>& along, const T* q_dot_t, Index key, int keys) {
  if (dot.bias)
    load_block<T, Panel<T>::kWidth>(dot.bias, along.bias, site.b, site.h, panel.first, panel.count, key, keys,
                                    [](Vec<T> x) { return x; });
  each_span(tile, [&](auto vectors, const Span& span) {
    span_tangents<T, vectors>(dot, tile, site, panel, along, q_dot_t, key, span);
  });
}

}  // namespace attention_ops
