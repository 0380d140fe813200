// Forward mode, in one pass over the tiles from lse: p = exp(s - lse) and s_dot (tangents.h), then
//   lse_dot = sum_j p s_dot,  out_dot = sum_j p (s_dot (v + b) + v_dot + b_dot) - lse_dot out
// with the sink in lse_dot, and dropout between p and v. A task is a panel of queries, which lie in lanes.
#pragma once
#include "kernels/cpu/dropout.h"
#include "kernels/cpu/lane_products.h"
#include "kernels/cpu/row_norm.h"
#include "kernels/cpu/tangents.h"

namespace attention_ops {

// What a call of the forward gave, and where the tangents of that go.
template <class T>
struct JvpRows {
  Matrices<const T> out;  // [B, H, Lq, Dv]; where it was rounded, there is none, and it is counted again into `counted`
  Matrices<T> counted;
  const T* lse;  // [B, H, Lq]
  Matrices<T> out_dot;
  T* lse_dot;
};

template <class T>
class AttentionJvp {
 public:
  AttentionJvp(const Problem<T>& problem, const Tangents<T>& along, const JvpRows<T>& rows)
      : p_(problem), along_(along), rows_(rows) {}

  Index tasks() const { return p_.batch * p_.heads * Panels::number(p_.queries); }
  size_t scratch_bytes() const {
    Scratch scratch;
    Pieces count;
    scratch.take(count, p_, along_, rows_.counted.data);
    return count.bytes;
  }

  // The last panels first: under a causal mask they are the longest.
  void run(Index task, Arena& arena) const {
    Scratch w;
    Pieces pieces(&arena);
    w.take(pieces, p_, along_, rows_.counted.data);
    const Index panels = Panels::number(p_.queries), bh = task / panels;
    const Site<T> site(p_, bh / p_.heads, bh % p_.heads);
    Panels panel(p_, panels - 1 - task % panels);
    start(w, site, panel);
    for (Index key = 0; key < p_.keys; key += kTileKeys) step(w, site, panel, key);
    visited_tiles.fetch_add(w.visited, std::memory_order_relaxed);
    finish(w, site, panel);
  }

 private:
  using Panels = Panel<T>;
  static constexpr int kWidth = Panels::kWidth, kStep = kLanes<T>;

  struct Scratch {
    T *q_t = nullptr, *q_dot_t = nullptr, *o_t = nullptr, *o_dot_t = nullptr, *lse_dot = nullptr;
    RowNorm<T> norm;
    LaneInt<T>* keep = nullptr;
    ScoreTile<T> tile;
    TangentTile<T> dot;
    Index visited = 0;

    void take(Pieces& pieces, const Problem<T>& p, const Tangents<T>& along, bool counts) {
      pieces(q_t, p.width * kWidth);
      if (along.q.data) pieces(q_dot_t, p.width * kWidth);
      pieces(o_dot_t, p.value_width * kWidth);
      if (counts) pieces(o_t, p.value_width * kWidth);
      pieces(lse_dot, kWidth), pieces(norm.base, kWidth), pieces(norm.log2_l, kWidth);
      if (p.dropout.on()) pieces(keep, Index(kTileKeys) * kWidth);
      tile.take(pieces, p, kWidth, /*derivatives=*/true);
      dot.take(pieces, p, along, kWidth, /*second=*/false);
    }
  };

  void start(Scratch& w, const Site<T>& site, Panels& panel) const {
    const auto transpose = [&](T* to, const Matrices<const T>& from) {
      if (to)
        rows_to_lanes(to, kWidth, from.at(site.b, site.h) + panel.first * from.row_stride, from.row_stride, panel.count,
                      p_.width, p_.query_factor());
    };
    transpose(w.q_t, p_.q), transpose(w.q_dot_t, along_.q);
    panel.q_t = w.q_t;
    find_row_norm(w.norm, rows_.lse + first_row(site, panel), w.tile, site, panel);
    std::fill_n(w.o_dot_t, p_.value_width * kWidth, T(0));
    if (w.o_t) std::fill_n(w.o_t, p_.value_width * kWidth, T(0));
    std::fill_n(w.lse_dot, kWidth, T(0));
  }

  void step(Scratch& w, const Site<T>& site, const Panels& panel, Index key) const {
    const int keys = int(std::min<Index>(kTileKeys, p_.keys - key));
    find_cover(w.tile, site, panel, key, keys);
    if (w.tile.cover == Cover::none) return;
    ++w.visited;
    if (w.keep)
      each_kept(site, panel, key, w.tile, [to = w.keep](Index n, Ints<T> kept) { store_lanes<T>(to + n, kept); });
    weigh(w, site, panel, key);
    compute_tangents(w.dot, w.tile, site, panel, along_, w.q_dot_t, key, keys);
    each_span(w.tile, [&](auto vectors, const Span& span) { move_weights<vectors>(w, span); });
    add_values(w.o_dot_t, w, w.dot.s, p_.v, site, key, keys);
    if (along_.v.data) add_values(w.o_dot_t, w, w.tile.s, along_.v, site, key, keys);
    if (w.o_t) add_values(w.o_t, w, w.tile.s, p_.v, site, key, keys);
    if (p_.distance.has_values) add_by_distance(w, site, panel, key);
  }

  // tile.s := p
  void weigh(Scratch& w, const Site<T>& site, const Panels& panel, Index key) const {
    each_span(w.tile, [&](auto vectors, const Span& span) {
      const auto exponent = [&](Vec<T> s, Index, int v) { return w.norm.log2_weight(s, (span.vector + v) * kStep); };
      span_weights<T, vectors>(w.tile, site, panel, key, span, exponent, [](Vec<T>, int) {});
    });
  }

  // dot.s := p s_dot, summed into lse_dot; then dropout of both.
  template <int NV>
  void move_weights(const Scratch& w, const Span& span) const {
    const LaneInt<T>* visible = w.tile.cover == Cover::some ? w.tile.visible : nullptr;
    const Vec<T> kept = splat(T(p_.dropout.scale));
    T* lse_dot = w.lse_dot + span.vector * kStep;
    Vec<T> sum[NV];
    for (int v = 0; v < NV; ++v) sum[v] = load(lse_dot + v * kStep);
    for (int k = span.key; k < span.key + span.keys; ++k)
      for (int v = 0; v < NV; ++v) {
        const Index n = Index(k) * kWidth + (span.vector + v) * kStep;
        const Vec<T> p = load(w.tile.s + n);
        Vec<T> x = p * load(w.dot.s + n);
        if (visible) x = load_lanes<T>(visible + n) ? x : Vec<T>{};
        sum[v] += x;
        if (w.keep) {
          const Ints<T> keep = load_lanes<T>(w.keep + n);
          store(w.tile.s + n, keep ? kept * p : Vec<T>{});
          x = keep ? kept * x : Vec<T>{};
        }
        store(w.dot.s + n, x);
      }
    for (int v = 0; v < NV; ++v) store(lse_dot + v * kStep, sum[v]);
  }

  // out += a rows, in lanes
  void add_values(T* out, const Scratch& w, const T* a, const Matrices<const T>& values, const Site<T>& site, Index key,
                  int keys) const {
    const T* rows = values.at(site.b, site.h / p_.group()) + key * values.row_stride;
    const bool some = w.tile.cover == Cover::some;
    const bool clean = !some || all_finite<T>(rows, values.row_stride, keys, p_.value_width);
    each_span(w.tile, [&](auto vectors, const Span& span) {
      const Index lane = span.vector * kStep, n = Index(span.key) * kWidth + lane;
      const T* from = rows + span.key * values.row_stride;
      if (clean)
        add_to_lanes<kWidth, vectors>(out + lane, from, values.row_stride, a + n, p_.value_width, span.keys);
      else
        add_visible_to_lanes<kWidth, vectors>(out + lane, from, values.row_stride, a + n, p_.value_width, span.keys,
                                              w.tile.visible + n);
    });
  }

  void add_by_distance(const Scratch& w, const Site<T>& site, const Panels& panel, Index key) const {
    const auto add = [&](T* out, const T* a, const DistanceTable<T>& table, const Span& span) {
      add_to_queries_by_distance(out, a, w.tile, span, table, 1 + p_.width, p_.value_width, site, panel, key);
    };
    each_span(w.tile, [&](auto, const Span& span) {
      add(w.o_dot_t, w.dot.s, p_.distance, span);
      if (along_.distance.defined()) add(w.o_dot_t, w.tile.s, along_.distance, span);
      if (w.o_t) add(w.o_t, w.tile.s, p_.distance, span);
    });
  }

  void finish(const Scratch& w, const Site<T>& site, const Panels& panel) const {
    if (along_.sinks)
      for (int lane = 0; lane < panel.count; ++lane) {
        const T p = std::exp2(site.sink() - w.norm.base[lane] - w.norm.log2_l[lane]);
        if (p != 0) w.lse_dot[lane] += p * along_.sinks[site.h];
      }
    std::copy_n(w.lse_dot, panel.count, rows_.lse_dot + first_row(site, panel));
    T ones[kWidth];
    std::fill_n(ones, kWidth, T(1));
    if (w.o_t)
      lanes_to_rows(rows_.counted.at(site.b, site.h) + panel.first * rows_.counted.row_stride, rows_.counted.row_stride,
                    w.o_t, kWidth, ones, panel.count, p_.value_width);
    const Matrices<const T> rows = w.o_t ? as_input(rows_.counted) : rows_.out;
    const T* out = rows.at(site.b, site.h) + panel.first * rows.row_stride;
    T* out_dot = rows_.out_dot.at(site.b, site.h) + panel.first * rows_.out_dot.row_stride;
    lanes_to_rows(w.o_dot_t, kWidth, ones, panel.count, p_.value_width, [&](int r, Index c, Vec<T> x, int n) {
      const Vec<T> o = read_elements<T>(out + r * rows.row_stride + c, 1, n);
      write_elements(out_dot + r * rows_.out_dot.row_stride + c, fma(splat(-w.lse_dot[r]), o, x), n);
    });
  }

  static Matrices<const T> as_input(const Matrices<T>& x) {
    return {x.data, x.batch_stride, x.head_stride, x.row_stride};
  }
  Index first_row(const Site<T>& site, const Panels& panel) const {
    return (site.b * p_.heads + site.h) * p_.queries + panel.first;
  }

  const Problem<T>& p_;
  Tangents<T> along_;
  JvpRows<T> rows_;
};

}  // namespace attention_ops
