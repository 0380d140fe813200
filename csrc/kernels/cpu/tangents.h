// How scores move when the inputs move along their tangents. A dot marks a tangent:
//   x_dot = scale (q_dot (k + a)' + q (k_dot + a_dot)'),  s_dot = softcap'(x) x_dot + bias_dot + r_dot
#pragma once
#include "kernels/cpu/score.h"

namespace attention_ops {

// Of the inputs of a problem, laid out as they are; what does not move has none.
template <class T>
struct Tangents {
  Matrices<const T> q, k, v;
  Tensor4 bias;
  DistanceTable<T> distance;
  const T* sinks = nullptr;  // [H]
  const T* lse = nullptr;    // [B, H, Lq], where it is given: to weights, and to backward passes
};

// Of the scores of a tile, [kTileKeys, panel width], not in log2 units. Unlike scores they are linear: a masked place
// may hold anything, and who reads it must leave it out.
template <class T>
struct TangentTile {
  T* s = nullptr;
  T* bias = nullptr;  // where it moves
  T* by_distance = nullptr;
  T* relative = nullptr;  // of q a'
  T* x = nullptr;         // x_dot / softcap, where there is one and a second derivative needs it

  void take(Pieces& pieces, const Problem<T>& p, const Tangents<T>& along, int width, bool second) {
    const Index size = Index(kTileKeys) * width;
    pieces(s, size);
    if (along.bias.defined()) pieces(bias, size);
    if (along.distance.defined()) pieces(by_distance, kTileKeys + width);
    if (p.distance.has_keys) pieces(relative, size);
    if (second && p.softcap > 0) pieces(x, size);
  }
};

template <class T, int NV>
void span_tangents(const TangentTile<T>& dot, const ScoreTile<T>& tile, const Site<T>& site, const Panel<T>& panel,
                   const Tangents<T>& along, const T* q_dot_t, Index key, int keys, const Span& span) {
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
      if (dot.relative) x += load(dot.relative + n);
      Vec<T> s = x * unit;
      if (tile.tanh) s *= splat(T(1)) - load(tile.tanh + n) * load(tile.tanh + n);
      if (dot.bias) s += load(dot.bias + n);
      if (dot.by_distance) s += load(dot.by_distance + keys - 1 - (span.key + r + i) + lane + v * kStep);
      store(dot.s + n, s);
      if (dot.x) store(dot.x + n, x);
    });
  });
}

// q_dot a' + q a_dot'
template <class T>
void relative_tangents(T* to, const ScoreTile<T>& tile, const Site<T>& site, const Panel<T>& panel,
                       const Tangents<T>& along, const T* q_dot_t, Index key, const Span& span) {
  each_vector<T, Panel<T>::kWidth>(span, [&](Index n, int) { store(to + n, Vec<T>{}); });
  const Index width = site.of.width;
  if (q_dot_t) multiply_by_distance<true>(to, tile, span, site.of.distance, 1, q_dot_t, width, site, panel, key);
  if (along.distance.defined())
    multiply_by_distance<true>(to, tile, span, along.distance, 1, panel.q_t, width, site, panel, key);
}

// Fills the tangents of a tile whose scores are known; q_dot_t is a panel like q_t.
template <class T>
void compute_tangents(const TangentTile<T>& dot, const ScoreTile<T>& tile, const Site<T>& site, const Panel<T>& panel,
                      const Tangents<T>& along, const T* q_dot_t, Index key, int keys) {
  if (dot.bias)
    load_block<T, Panel<T>::kWidth>(dot.bias, along.bias, site.b, site.h, panel.first, panel.count, key, keys,
                                    [](Vec<T> x) { return x; });
  if (dot.by_distance)
    load_by_distance(dot.by_distance, along.distance, site, panel, key, keys, [](Vec<T> x) { return x; });
  each_span(tile, [&](auto vectors, const Span& span) {
    if (dot.relative) relative_tangents(dot.relative, tile, site, panel, along, q_dot_t, key, span);
    span_tangents<T, vectors>(dot, tile, site, panel, along, q_dot_t, key, keys, span);
  });
}

}  // namespace attention_ops
