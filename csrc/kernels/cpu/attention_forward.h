// Forward: s = scale q (k + a)' (score.h), p = 2^(s - m), l = sum p, o = p (v + b) / l, lse = m + log l, with l and o
// summed tile by tile and the sink last. m is the maximum of the first keys that a row sees: it moves only where later
// scores are far above it, so that products, exponentials and sums are one pass. Queries lie in vector lanes:
// s[key][query], o[column][query]; nothing is summed across lanes.
#pragma once
#include <cmath>
#include <memory>
#include <utility>

#include "kernels/cpu/dropout.h"
#include "kernels/cpu/key_columns.h"
#include "kernels/cpu/lane_products.h"
#include "kernels/cpu/row_turn.h"

namespace attention_ops {

template <class T, class E = T>
struct ForwardResult {
  Matrices<E> out;  // [B, H, Lq, Dv]
  T* lse;           // [B, H, Lq]
};

// Sums in T of products of rows of E.
template <class T, class E = T>
class AttentionForward {
 public:
  // `turn`, if defined, is of the queries' rows.
  AttentionForward(const Problem<T, E>& problem, const ForwardResult<T, E>& result, const RowTurn<T>& turn = {})
      : p_(problem),
        result_(result),
        turn_(turn),
        values_(problem.v, problem.batch, problem.key_heads, problem.keys, problem.value_width) {
    Pieces count;
    values_.take(count);
    if (count.bytes == 0) return;  // an arena of nothing would hold the kept block
    memory_ = std::make_unique<Arena>(count.bytes);
    Pieces pieces(memory_.get());
    values_.take(pieces);
  }

  // Come first, in any order.
  Index pack_tasks() const { return values_.tasks(); }
  void pack(Index task) const { values_.pack(task); }

  Index tasks() const { return p_.batch * p_.heads * Panels::number(p_.queries); }
  size_t scratch_bytes() const {
    Scratch scratch;
    Pieces count;
    scratch.take(count, p_, turn_.defined());
    return count.bytes;
  }

  // A task is one panel of one head, the last panels first: under a causal mask they are the longest.
  void run(Index task, Arena& arena) const {
    [[maybe_unused]] const ProductUnit<E> unit;
    Scratch scratch;
    Pieces pieces(&arena);
    scratch.take(pieces, p_, turn_.defined());
    const Index panels = Panels::number(p_.queries), bh = task / panels;
    const Site<T, E> site(p_, bh / p_.heads, bh % p_.heads);
    Panels panel(p_, panels - 1 - task % panels);
    start(scratch, site, panel);
    const Index tiles = (p_.keys + kTileKeys - 1) / kTileKeys, first = first_tile(panel);
    for (Index n = 0; n < tiles; ++n) {
      const Index tile = (first + n) % tiles, rest = tiles - std::max(n, tile);
      if (tile % kRun == 0 && rest >= kRun && is_hidden(site, panel, tile * kTileKeys, kRun * kTileKeys))
        n += kRun - 1;
      else
        step(scratch, site, panel, tile * kTileKeys);
    }
    add_pending(scratch, site, panel);
    finish(scratch, site, panel);
  }

 private:
  using Panels = Panel<T, E>;
  static constexpr int kWidth = Panels::kWidth;

  static constexpr Index kRun = 8;     // of tiles, of which a mask is asked first
  static constexpr T kMost = 1 << 10;  // more than this in a sum, and m moves

  struct Scratch {
    E *turned = nullptr, *q_t = nullptr, *rounded = nullptr;  // rounded: p as an operand of products of pairs
    T *o_t = nullptr, *m = nullptr, *l = nullptr;
    Index visited = 0;
    bool has_maximum = false;
    Pending pending;  // tiles whose rounded p are not yet multiplied with values
    LaneInt<T>* moves = nullptr;
    ScoreTile<T> tile;

    void take(Pieces& pieces, const Problem<T, E>& p, bool turns) {
      if (turns) pieces(turned, kWidth * p.width);
      pieces(q_t, round_up(p.width, kDepthUnit<E>) * kWidth);
      if (kPaired<E>) pieces(rounded, kPairTiles * kTileKeys * kWidth);
      pieces(o_t, round_up(p.value_width, kRowUnit<E>) * kWidth);
      pieces(m, kWidth), pieces(l, kWidth), pieces(moves, kWidth);
      tile.take(pieces, p, kWidth, /*derivatives=*/false);
    }
  };

  void start(Scratch& w, const Site<T, E>& site, Panels& panel) const {
    const PaddedRows<E> rows = rows_of(w, site, panel);
    rows_to_panel(w.q_t, kWidth, rows.data, rows.stride, panel.count, p_.width, p_.query_factor());
    panel.q_t = w.q_t;
    std::fill_n(w.o_t, round_up(p_.value_width, kRowUnit<E>) * kWidth, T(0));
    std::fill_n(w.m, kWidth, -kInfinity<T>);
    std::fill_n(w.l, kWidth, T(0));
  }

  PaddedRows<E> rows_of(const Scratch& w, const Site<T, E>& site, const Panels& panel) const {
    const PaddedRows<E> rows{site.q + panel.first * p_.q.row_stride, p_.q.row_stride};
    if (!turn_.defined()) return rows;
    for (int r = 0; r < panel.count; ++r)
      turn_(w.turned + r * p_.width, rows.data + r * rows.stride, 1, p_.width, site.b, panel.first + r);
    return {w.turned, p_.width};
  }

  // That of the first row's own key, which most masks show to all rows, and where a bias by distance is often greatest:
  // begun there, m need not move.
  Index first_tile(const Panels& panel) const {
    if (p_.keys == 0 || (p_.mask.spec->depth() == 0 && !p_.distance.defined())) return 0;
    return std::clamp<Index>(panel.first + p_.keys - p_.queries, 0, p_.keys - 1) / kTileKeys;
  }

  void step(Scratch& w, const Site<T, E>& site, const Panels& panel, Index key) const {
    const int keys = int(std::min<Index>(kTileKeys, p_.keys - key));
    find_cover(w.tile, site, panel, key, keys);
    if (w.tile.cover == Cover::none) return;
    ++w.visited;
    const bool clean = is_clean(w, site, key, keys);
    each_span(w.tile, [&](auto vectors, const Span& span) {
      const SpanOf<vectors> part(w, span);
      if constexpr (kPaired<E>) {
        const Index tile = key / kTileKeys;
        if (!w.pending.accepts(tile, most_pending())) add_pending(w, site, panel);
        if (clean && weigh_pairs<vectors>(w, site, key, span)) return void(w.pending.add(tile));
        add_pending(w, site, panel);
      }
      if (outgrows<vectors>(w, site, panel, key, span)) {
        span_scores<T, vectors>(w.tile, site, panel, key, span);
        part.move_maximum(p_.value_width);
        w.has_maximum = true;
      }
      if (p_.dropout.on())
        each_kept(site, panel, key, span,
                  [s = w.tile.s](Index n, Ints<T> kept) { store(s + n, kept ? load(s + n) : Vec<T>{}); });
      const E* rows = site.v + (key + span.key) * p_.v.row_stride;
      if (!clean)
        add_visible_to_lanes<kWidth, vectors>(part.o_t, rows, p_.v.row_stride, part.s, p_.value_width, span.keys,
                                              part.visible);
      if constexpr (kPaired<E>)
        part.add_columns(values_.at(site.b, site.h / p_.group(), key), w.rounded, p_.value_width, span);
      else if (clean)
        add_to_lanes<kWidth, vectors>(part.o_t, rows, p_.v.row_stride, part.s, p_.value_width, span.keys);
      if constexpr (std::is_same_v<T, E>) add_by_distance(w, site, panel, key, span);
    });
  }

  // o += p b
  void add_by_distance(const Scratch& w, const Site<T, E>& site, const Panels& panel, Index key,
                       const Span& span) const {
    if (p_.distance.has_values)
      add_to_queries_by_distance(w.o_t, w.tile.s, w.tile, span, p_.distance, 1 + p_.width, p_.value_width, site, panel,
                                 key);
  }

  // Whether products may take the tile's values as they are.
  bool is_clean(const Scratch& w, const Site<T, E>& site, Index key, int keys) const {
    if constexpr (kPaired<E>)
      return values_.finite(site.b, site.h / p_.group(), key);
    else
      return w.tile.cover == Cover::all ||
             all_finite<T>(site.v + key * p_.v.row_stride, p_.v.row_stride, keys, p_.value_width);
  }

  // s := p = 2^(s - m), l += sum p. Or true, and l as it was, where the m of some row must move: of those whose sum is
  // far above 1, in `moves`. What a row does depends on its own scores alone.
  template <int NV>
  bool outgrows(const Scratch& w, const Site<T, E>& site, const Panels& panel, Index key, const Span& span) const {
    const Index lane = span.vector * kLanes<T>;
    if (!w.has_maximum) return std::fill_n(w.moves + lane, NV * kLanes<T>, LaneInt<T>(-1)), true;
    const T* m = w.m + lane;
    Vec<T> sum[NV]{};
    span_weights<T, NV>(
        w.tile, site, panel, key, span, [&](Vec<T> s, Index, int v) { return s - load(m + v * kLanes<T>); },
        [&](Vec<T> p, int v) { sum[v] += p; });
    Ints<T> outgrown{};
    for (int v = 0; v < NV; ++v) {
      const Ints<T> far = ~(sum[v] <= splat(kMost));
      store_lanes<T>(w.moves + lane + v * kLanes<T>, far);
      outgrown |= far;
    }
    if (any(outgrown)) return true;
    for (int v = 0; v < NV; ++v) {
      T* l = w.l + lane + v * kLanes<T>;
      store(l, load(l) + sum[v]);
    }
    return false;
  }

  // Narrow sums stay in the first cache, and the p of one tile in registers for all of them (multiply_tiles_by_few).
  int most_pending() const { return p_.value_width > 64 ? kPairTiles : 1; }

  // o += p v of the tiles that wait for it.
  void add_pending(Scratch& w, const Site<T, E>& site, const Panels& panel) const {
    if constexpr (kPaired<E>)
      if (const Pending tiles = std::exchange(w.pending, {}); tiles.count > 0)
        multiply_pairs<true>(w.o_t, kWidth, values_.at(site.b, site.h / p_.group(), tiles.first * kTileKeys),
                             {w.rounded, 2 * kWidth}, p_.value_width, panel.vectors(), tiles.count * kTileKeys);
  }

  // The same in one pass for whole tiles of plain scores, with p rounded on the way for add_pending; true if done.
  template <int NV>
  bool weigh_pairs(const Scratch& w, const Site<T, E>& site, Index key, const Span& span) const {
    constexpr int kStep = kLanes<T>;
    if (!w.has_maximum || w.tile.cover != Cover::all || span.keys != kTileKeys) return false;
    if (!p_.is_plain()) return false;
    const Vec<T> factor = splat(p_.query_factor());
    Vec<T> m[NV], sum[NV]{};
    for (int v = 0; v < NV; ++v) m[v] = load(w.m + v * kStep);
    for (int block = 0; block < kTileKeys; block += kPairBlockKeys) {
      const T* s = w.tile.s;
      E* rounded = w.rounded + (w.pending.count * kTileKeys + block) * kWidth;
      multiply_pairs<false>(w.tile.s, kWidth, {site.k + (key + block) * p_.k.row_stride, p_.k.row_stride},
                            {w.q_t, 2 * kWidth}, kPairBlockKeys, NV, p_.width);
      const E* next = site.k + (key + block + kPairBlockKeys) * p_.k.row_stride;
      for (int n = 0; n < kPairBlockKeys * kWidth; n += 2 * kWidth, next += 2 * p_.k.row_stride) {
        for (int row = 0; row < 2; ++row) prefetch_row<true>(next + row * p_.k.row_stride, p_.width * sizeof(E));
        for (int v = 0; v < NV * kStep; v += kStep) {
          // Rounded as it is on the other path: a row's bits do not depend on its neighbours.
          const auto exponent = [&](const T* x) { return load(x) * factor - m[v / kStep]; };
          const Vec<T> first = exp2<T, E>(exponent(s + n + v)), second = exp2<T, E>(exponent(s + n + kWidth + v));
          store_pairs(rounded + n + 2 * v, round_pairs(first, second));
          sum[v / kStep] += first, sum[v / kStep] += second;  // in the order of the other path
        }
      }
    }
    Ints<T> outgrown{};
    for (int v = 0; v < NV; ++v) outgrown |= ~(sum[v] <= splat(kMost));
    if (any(outgrown)) return false;
    for (int v = 0; v < NV; ++v) {
      T* l = w.l + v * kStep;
      store(l, load(l) + sum[v]);
    }
    return true;
  }

  // The softmax's step over one span, the span's place in every buffer.
  template <int NV>
  struct SpanOf {
    T *s, *o_t, *m, *l;
    const LaneInt<T>*visible, *moves;
    int keys;

    SpanOf(const Scratch& w, const Span& span) : keys(span.keys) {
      const Index lane = span.vector * kLanes<T>, first = Index(span.key) * kWidth + lane;
      s = w.tile.s + first, o_t = w.o_t + lane, m = w.m + lane, l = w.l + lane, moves = w.moves + lane;
      visible = w.tile.cover == Cover::some ? w.tile.visible + first : nullptr;
    }

    // m' = max(m, s) where m moves, s := p = 2^(s - m'), l := 2^(m - m') l + sum p, o := 2^(m - m') o
    void move_maximum(Index width) const {
      constexpr int kStep = kLanes<T>;
      Vec<T> top[NV], sum[NV]{}, alpha[NV];
      for (int v = 0; v < NV; ++v) top[v] = load(m + v * kStep);
      for (int k = 0; k < keys; ++k)
        for (int v = 0; v < NV; ++v) top[v] = max(load(s + k * kWidth + v * kStep), top[v]);
      for (int v = 0; v < NV; ++v) {
        const Vec<T> old = load(m + v * kStep);
        top[v] = load_lanes<T>(moves + v * kStep) ? top[v] : old;
        store(m + v * kStep, top[v]);
        top[v] = top[v] == splat(-kInfinity<T>) ? Vec<T>{} : top[v];  // nothing visible yet
        alpha[v] = rescale<T>(old, top[v]);
      }
      for (int k = 0; k < keys; ++k)
        for (int v = 0; v < NV; ++v) {
          const Index n = k * kWidth + v * kStep;
          const Vec<T> p = exp2<T, E>(load(s + n) - top[v]);
          store(s + n, p);
          sum[v] += p;
        }
      for (int v = 0; v < NV; ++v) store(l + v * kStep, fma(alpha[v], load(l + v * kStep), sum[v]));
      for (Index d = 0; d < width; ++d)
        for (int v = 0; v < NV; ++v) {
          T* o = o_t + d * kWidth + v * kStep;
          store(o, alpha[v] * load(o));
        }
    }

    // o += p v for pairs; `v` is the tile's columns.
    void add_columns(const PiecedRows& v, E* rounded, Index width, const Span& span) const {
      const int lane = span.vector * kLanes<T>, first = span.key / kPairDepth * kPairDepth;
      rounded += 2 * lane;
      round_across(rounded, s - span.key * kWidth, kWidth, span.key, span.key + keys, NV);
      multiply_pairs<true>(o_t, kWidth, {v.data + first, v.stride}, {rounded + first * kWidth, 2 * kWidth}, width, NV,
                           span.key + keys - first);
    }
  };

  void finish(const Scratch& w, const Site<T, E>& site, const Panels& panel) const {
    T* lse = result_.lse + (site.b * p_.heads + site.h) * p_.queries + panel.first;
    E* out = result_.out.at(site.b, site.h) + panel.first * result_.out.row_stride;
    const Vec<T> kept = splat(T(p_.dropout.scale)), sink = splat(site.sink());
    visited_tiles.fetch_add(w.visited, std::memory_order_relaxed);
    for (int q = 0; q < kWidth; q += kLanes<T>) {
      const Vec<T> m = load(w.m + q), top = max(sink, m), base = top == splat(-kInfinity<T>) ? Vec<T>{} : top;
      const Vec<T> alpha = rescale<T>(m, base), l = alpha * load(w.l + q) + rescale<T>(sink, base);
      const Ints<T> empty = l == Vec<T>{};
      store(w.m + q, empty ? splat(-kInfinity<T>) : (base + log2<T>(l)) * splat(kLn2<T>));
      store(w.l + q, empty ? Vec<T>{} : kept * alpha / l);
    }
    std::copy_n(w.m, panel.count, lse);
    lanes_to_rows(out, result_.out.row_stride, w.o_t, kWidth, w.l, panel.count, p_.value_width);
  }

  const Problem<T, E>& p_;
  ForwardResult<T, E> result_;
  RowTurn<T> turn_;
  KeyColumns<E> values_;
  std::unique_ptr<Arena> memory_;  // of `values_`
};

}  // namespace attention_ops
