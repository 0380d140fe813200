// Weights that nobody has an lse for: the scores of a panel's rows are kept, [Lk, panel width], until their maxima and
// sums are known. s with m = max s, then p = 2^(s - m) with l = sum p, the sink in both, then p / l; each score is
// computed once.
#pragma once
#include "kernels/cpu/score.h"
#include "kernels/cpu/weight_rows.h"

namespace attention_ops {

// Sums in T of products of rows of E.
template <class T, class E = T>
class AttentionSoftmax {
 public:
  AttentionSoftmax(const Problem<T, E>& p, const Tensor4& out, bool average) : p_(p), rows_(p, out, average) {}

  Index tasks() const { return rows_.tasks(); }
  size_t scratch_bytes() const {
    Pieces count;
    Scratch().take(count, p_, rows_);
    return count.bytes;
  }
  void run(Index task, Arena& arena) const {
    [[maybe_unused]] const ProductUnit<E> unit;
    Scratch w;
    Pieces pieces(&arena);
    w.take(pieces, p_, rows_);
    auto part = rows_.part(task);
    if (w.sum) std::fill_n(w.sum, p_.keys * kWidth, T(0));
    for (Index h = part.first; h < part.last; ++h) {
      const Site<T, E> site(p_, part.b, h);
      find_scores(w, site, part.panel);
      with_count<kRegisterVectors>(part.panel.vectors(), [&](auto vectors) {
        Ints<T> lost[vectors]{};
        if (weigh<vectors>(w, site, lost)) find_scores(w, site, part.panel), weigh<vectors>(w, site, lost);
        if (w.sum) add<vectors>(w);
      });
    }
    if (w.sum) std::fill_n(w.factors, kWidth, T(1) / T(p_.heads)), std::fill_n(w.seen, rows_.tiles(), true);
    rows_.write(w.sum ? w.sum : w.p, w.factors, w.seen, part);
  }

 private:
  using Panels = Panel<T, E>;
  static constexpr int kWidth = Panels::kWidth, kStep = kLanes<T>;

  struct Scratch {
    E* q_t = nullptr;
    T *p = nullptr, *sum = nullptr;      // [Lk, panel width]: of a head, and of the heads whose mean is wanted
    T *m = nullptr, *factors = nullptr;  // of the rows
    bool* seen = nullptr;                // the tiles of a head that are computed
    ScoreTile<T> tile;

    void take(Pieces& pieces, const Problem<T, E>& problem, const WeightRows<T, E>& rows) {
      pieces(q_t, round_up(problem.width, kDepthUnit<E>) * kWidth);
      pieces(m, kWidth), pieces(factors, kWidth);
      pieces(seen, rows.tiles());
      tile.take(pieces, problem, kWidth, /*derivatives=*/false);
      pieces(p, round_up(problem.keys, kRowUnit<E>) * kWidth);
      if (rows.average()) pieces(sum, problem.keys * kWidth);
    }
  };

  // s in the place of p, minus infinity where it is masked, and m.
  void find_scores(Scratch& w, const Site<T, E>& site, Panels& panel) const {
    rows_to_panel(w.q_t, kWidth, site.q + panel.first * p_.q.row_stride, p_.q.row_stride, panel.count, p_.width,
                  p_.query_factor());
    panel.q_t = w.q_t;
    std::fill_n(w.m, kWidth, site.sink());
    Index visited = 0;
    for (Index key = 0; key < p_.keys; key += kTileKeys) {
      const int keys = int(std::min<Index>(kTileKeys, p_.keys - key));
      w.tile.s = w.p + key * kWidth;
      find_cover(w.tile, site, panel, key, keys);
      w.seen[key / kTileKeys] = w.tile.cover != Cover::none;
      if (w.tile.cover == Cover::none) continue;
      ++visited;
      if (w.tile.cover == Cover::some) std::fill_n(w.tile.s, keys * kWidth, -kInfinity<T>);
      each_span(w.tile, [&](auto vectors, const Span& span) {
        span_scores<T, vectors>(w.tile, site, panel, key, span);
        raise_maxima<vectors>(w, span);
      });
    }
    visited_tiles.fetch_add(visited, std::memory_order_relaxed);
  }

  template <int NV>
  static void raise_maxima(const Scratch& w, const Span& span) {
    Vec<T> m[NV];
    T* of_span = w.m + span.vector * kStep;
    for (int v = 0; v < NV; ++v) m[v] = load(of_span + v * kStep);
    const T* s = w.tile.s + span.key * kWidth + span.vector * kStep;
    for (int k = 0; k < span.keys; ++k)
      for (int v = 0; v < NV; ++v) m[v] = max(load(s + k * kWidth + v * kStep), m[v]);
    for (int v = 0; v < NV; ++v) store(of_span + v * kStep, m[v]);
  }

  // Calls f(offset of the first of a row's vectors) for every key of the tiles that are seen.
  template <class F>
  void each_seen_key(const Scratch& w, F&& f) const {
    for (Index tile = 0; tile < rows_.tiles(); ++tile)
      for (Index key = tile * kTileKeys; w.seen[tile] && key < std::min((tile + 1) * kTileKeys, p_.keys); ++key)
        f(key * kWidth);
  }

  // p, and 1 / l as the rows' factors: 0 for a row that sees nothing. True if rows are found whose l is NaN, which are
  // `lost` the next time: NaN where they see, and 0 where they do not, as everywhere.
  template <int NV>
  bool weigh(const Scratch& w, const Site<T, E>& site, Ints<T> (&lost)[NV]) const {
    Vec<T> base[NV], l[NV];
    for (int v = 0; v < NV; ++v) {
      const Vec<T> m = load(w.m + v * kStep), known = m == splat(-kInfinity<T>) ? Vec<T>{} : m;
      base[v] = lost[v] ? splat(std::numeric_limits<T>::quiet_NaN()) : known;
      l[v] = rescale<T>(splat(site.sink()), base[v]);
    }
    each_seen_key(w, [&](Index n) {
      for (int v = 0; v < NV; ++v) {
        const Vec<T> s = load(w.p + n + v * kStep), p = s == splat(-kInfinity<T>) ? Vec<T>{} : exp2<T>(s - base[v]);
        store(w.p + n + v * kStep, p);
        l[v] += p;
      }
    });
    Ints<T> found{};
    for (int v = 0; v < NV; ++v) {
      const Vec<T> factor = l[v] == Vec<T>{} ? Vec<T>{} : splat(T(1)) / l[v];
      store(w.factors + v * kStep, lost[v] ? splat(T(1)) : factor);
      found |= ~lost[v] & (l[v] != l[v]);
      lost[v] |= l[v] != l[v];
    }
    return any(found);
  }

  template <int NV>
  void add(const Scratch& w) const {
    each_seen_key(w, [&](Index n) {
      for (int v = 0; v < NV * kStep; v += kStep)
        store(w.sum + n + v, fma(load(w.factors + v), load(w.p + n + v), load(w.sum + n + v)));
    });
  }

  const Problem<T, E>& p_;
  WeightRows<T, E> rows_;
};

}  // namespace attention_ops
