// Forward: s = scale q k' (score.h), p = 2^(s - m), l = sum p, o = p v / l, lse = m + log l, with l and o summed tile
// by tile. m is the maximum of the row's first tile: it moves only where a later score is far above it, so that
// products, exponentials and sums are one pass. Queries lie in vector lanes: s[key][query], o[column][query]; nothing
// is summed across lanes.
#pragma once
#include <cmath>

#include "kernels/cpu/score.h"

namespace attention_ops {

template <class T>
struct ForwardResult {
  Matrices<T> out;  // [B, H, Lq, Dv]
  T* lse;           // [B, H, Lq]
};

template <class T>
class AttentionForward {
 public:
  AttentionForward(const Problem<T>& problem, const ForwardResult<T>& result) : p_(problem), result_(result) {}

  Index tasks() const { return p_.batch * p_.heads * Panels::number(p_.queries); }
  size_t scratch_bytes() const {
    Scratch scratch;
    Pieces count;
    scratch.take(count, p_);
    return count.bytes;
  }

  // A task is one panel of one head, the last panels first: under a causal mask they are the longest.
  void run(Index task, Arena& arena) const {
    Scratch scratch;
    Pieces pieces(&arena);
    scratch.take(pieces, p_);
    const Index panels = Panels::number(p_.queries), bh = task / panels;
    const Site<T> site(p_, bh / p_.heads, bh % p_.heads);
    Panels panel(p_, panels - 1 - task % panels);
    start(scratch, site, panel);
    for (Index key = 0; key < p_.keys; key += kTileKeys) step(scratch, site, panel, key);
    finish(scratch, site, panel);
  }

 private:
  using Panels = Panel<T>;
  static constexpr int kWidth = Panels::kWidth;

  struct Scratch {
    T *q_t = nullptr, *o_t = nullptr, *m = nullptr, *l = nullptr;
    bool has_maximum = false;
    LaneInt<T>*moves = nullptr, *keep = nullptr;
    ScoreTile<T> tile;

    void take(Pieces& pieces, const Problem<T>& p) {
      pieces(q_t, p.width * kWidth);
      pieces(o_t, p.value_width * kWidth);
      pieces(m, kWidth), pieces(l, kWidth), pieces(moves, kWidth);
      if (p.dropout.on()) pieces(keep, Index(kTileKeys) * kWidth);
      tile.take(pieces, p, kWidth, /*backward=*/false);
    }
  };

  void start(Scratch& w, const Site<T>& site, Panels& panel) const {
    rows_to_lanes(w.q_t, kWidth, site.q + panel.first * p_.q.row_stride, p_.q.row_stride, panel.count, p_.width,
                  p_.query_factor());
    panel.q_t = w.q_t;
    std::fill_n(w.o_t, p_.value_width * kWidth, T(0));
    const T sink = site.sink();
    std::fill_n(w.m, kWidth, sink);
    std::fill_n(w.l, kWidth, T(sink != -kInfinity<T>));
  }

  void step(Scratch& w, const Site<T>& site, const Panels& panel, Index key) const {
    const int keys = int(std::min<Index>(kTileKeys, p_.keys - key));
    find_cover(w.tile, site, panel, key, keys);
    if (w.tile.cover == Cover::none) return;
    visited_tiles.fetch_add(1, std::memory_order_relaxed);
    if (p_.dropout.on()) fill_kept(w.keep, site, panel, key, keys);
    const bool clean =
        w.tile.cover == Cover::all || all_finite(site.v + key * p_.v.row_stride, p_.v.row_stride, keys, p_.value_width);
    each_span(w.tile, [&](auto vectors, const Span& span) {
      const SpanOf<vectors> part(w, span);
      if (outgrows<vectors>(w, site, panel, key, span)) {
        span_scores<T, vectors>(w.tile, site, panel, key, span);
        part.move_maximum(p_.value_width);
        w.has_maximum = true;
      }
      if (p_.dropout.on()) part.drop();
      const T* rows = site.v + (key + span.key) * p_.v.row_stride;
      clean ? part.add_values(rows, p_.v.row_stride, p_.value_width)
            : part.add_visible_values(rows, p_.v.row_stride, p_.value_width);
    });
  }

  // s := p = 2^(s - m), l += sum p. Or true, and l as it was, where the m of some row must move: of those whose sum is
  // far above 1, in `moves`. What a row does depends on its own scores alone.
  template <int NV>
  bool outgrows(const Scratch& w, const Site<T>& site, const Panels& panel, Index key, const Span& span) const {
    constexpr T kMost = 1 << 24;
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

  // The softmax's step over one span, the span's place in every buffer.
  template <int NV>
  struct SpanOf {
    T *s, *o_t, *m, *l;
    const LaneInt<T>*visible, *keep, *moves;
    int keys;

    SpanOf(const Scratch& w, const Span& span) : keys(span.keys) {
      const Index lane = span.vector * kLanes<T>, first = Index(span.key) * kWidth + lane;
      s = w.tile.s + first, o_t = w.o_t + lane, m = w.m + lane, l = w.l + lane, moves = w.moves + lane;
      keep = w.keep ? w.keep + first : nullptr;
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
          const Vec<T> p = exp2<T>(load(s + n) - top[v]);
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

    void drop() const {
      for (int k = 0; k < keys; ++k)
        for (int n = k * kWidth; n < k * kWidth + NV * kLanes<T>; n += kLanes<T>)
          store(s + n, load_lanes<T>(keep + n) ? load(s + n) : Vec<T>{});
    }

    // o += p v
    void add_values(const T* v, Index stride, Index width) const {
      each_row_tile<kTileRows<NV>>(width, [&](auto rows, Index d) {
        Accumulators<T, rows, NV> acc;
        T* o = o_t + d * kWidth;
        each<T, rows, NV>(acc, [&](Vec<T>& x, int r, int n) { x = load(o + r * kWidth + n * kLanes<T>); });
        multiply_columns<T, rows, NV>(acc, v + d, stride, s, kWidth, keys);
        each<T, rows, NV>(acc, [&](Vec<T>& x, int r, int n) { store(o + r * kWidth + n * kLanes<T>, x); });
      });
    }

    // The same, to the bit, without touching the values that a lane does not see.
    void add_visible_values(const T* v, Index stride, Index width) const {
      for (Index d = 0; d < width; ++d)
        for (int n = 0; n < NV * kLanes<T>; n += kLanes<T>) {
          Vec<T> acc = load(o_t + d * kWidth + n);
          for (int k = 0; k < keys; ++k) {
            const Vec<T> sum = fma(splat(v[k * stride + d]), load(s + k * kWidth + n), acc);
            acc = load_lanes<T>(visible + k * kWidth + n) ? sum : acc;
          }
          store(o_t + d * kWidth + n, acc);
        }
    }
  };

  void finish(const Scratch& w, const Site<T>& site, const Panels& panel) const {
    T* lse = result_.lse + (site.b * p_.heads + site.h) * p_.queries + panel.first;
    T* out = result_.out.at(site.b, site.h) + panel.first * result_.out.row_stride;
    const T kept = T(p_.dropout.scale());
    for (int q = 0; q < kWidth; q += kLanes<T>) {
      const Vec<T> m = load(w.m + q), l = load(w.l + q);
      const Ints<T> empty = l == Vec<T>{};
      store(w.m + q, empty ? splat(-kInfinity<T>) : (m + log2<T>(l)) * splat(kLn2<T>));
      store(w.l + q, empty ? Vec<T>{} : splat(kept) / l);
    }
    std::copy_n(w.m, panel.count, lse);
    lanes_to_rows(out, result_.out.row_stride, w.o_t, kWidth, w.l, panel.count, p_.value_width);
  }

  const Problem<T>& p_;
  ForwardResult<T> result_;
};

}  // namespace attention_ops
