// Forward: s = scale q k' (score.h), p = exp(s - m), l = sum p, o = p v / l, lse = m + log l, with m, l and o updated
// tile by tile. Queries lie in vector lanes: s[key][query], o[column][query]; nothing is summed across lanes.
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
  static constexpr int kRows = kForwardRows, kVectors = kForwardVectors;
  using Panels = Panel<T, kVectors>;
  static constexpr int kWidth = Panels::kWidth;

  struct Scratch {
    T *q_t, *o_t, *m, *l, *alpha;
    LaneInt<T>* keep;
    ScoreTile<T> tile;

    void take(Pieces& pieces, const Problem<T>& p) {
      pieces(q_t, p.width * kWidth);
      pieces(o_t, p.value_width * kWidth);
      pieces(m, kWidth), pieces(l, kWidth), pieces(alpha, kWidth);
      if (p.dropout.on()) pieces(keep, Index(kTileKeys) * kWidth);
      tile.take(pieces, p, kWidth, /*backward=*/false);
    }
  };

  void start(Scratch& w, const Site<T>& site, Panels& panel) const {
    transpose_into(w.q_t, kWidth, site.q + panel.first * p_.q.row_stride, p_.q.row_stride, panel.count, p_.width,
                   p_.query_factor());
    panel.q_t = w.q_t;
    std::fill_n(w.o_t, p_.value_width * kWidth, T(0));
    const T sink = p_.sinks ? p_.sinks[site.h] * kLog2e<T> : -kInfinity<T>;
    std::fill_n(w.m, kWidth, sink);
    std::fill_n(w.l, kWidth, T(sink != -kInfinity<T>));
  }

  void step(const Scratch& w, const Site<T>& site, const Panels& panel, Index key) const {
    const int keys = int(std::min<Index>(kTileKeys, p_.keys - key));
    const Cover cover = compute_scores<T, kRows>(w.tile, site, panel, key, keys);
    if (cover == Cover::none) return;
    visited_tiles.fetch_add(1, std::memory_order_relaxed);
    update_softmax(w, keys);
    if (p_.dropout.on()) {
      fill_kept(w.keep, site, panel, key, keys);
      apply_kept<T, kWidth>(w.tile.s, w.keep, T(1), keys);
    }
    const T* v = site.v + key * p_.v.row_stride;
    if (cover == Cover::all || all_finite(v, p_.v.row_stride, keys, p_.value_width))
      add_values(w, v, keys);
    else
      add_visible_values(w, v, keys);
  }

  // m' = max(m, s), alpha = 2^(m - m'), s := p = 2^(s - m'), l := alpha l + sum p
  static void update_softmax(const Scratch& w, int keys) {
    constexpr int kStep = kLanes<T>;
    Vec<T> top[kVectors], base[kVectors], sum[kVectors]{};
    for (int v = 0; v < kVectors; ++v) top[v] = load(w.m + v * kStep);
    for (int k = 0; k < keys; ++k)
      for (int v = 0; v < kVectors; ++v) top[v] = max(load(w.tile.s + k * kWidth + v * kStep), top[v]);
    for (int v = 0; v < kVectors; ++v) {
      base[v] = top[v] == splat(-kInfinity<T>) ? Vec<T>{} : top[v];  // nothing visible yet
      store(w.alpha + v * kStep, exp2<T>(load(w.m + v * kStep) - base[v]));
      store(w.m + v * kStep, top[v]);
    }
    for (int k = 0; k < keys; ++k)
      for (int v = 0; v < kVectors; ++v) {
        T* s = w.tile.s + k * kWidth + v * kStep;
        const Vec<T> p = exp2<T>(load(s) - base[v]);
        store(s, p);
        sum[v] += p;
      }
    for (int v = 0; v < kVectors; ++v)
      store(w.l + v * kStep, fma(load(w.alpha + v * kStep), load(w.l + v * kStep), sum[v]));
  }

  // o := alpha o + p v
  void add_values(const Scratch& w, const T* v, int keys) const {
    each_row_tile<kRows>(p_.value_width, [&](auto rows, Index d) {
      Accumulators<T, rows, kVectors> acc;
      T* o = w.o_t + d * kWidth;
      each<T, rows, kVectors>(acc, [&](Vec<T>& x, int r, int n) {
        x = load(w.alpha + n * kLanes<T>) * load(o + r * kWidth + n * kLanes<T>);
      });
      multiply_columns<T, rows, kVectors>(acc, v + d, p_.v.row_stride, w.tile.s, kWidth, keys);
      each<T, rows, kVectors>(acc, [&](Vec<T>& x, int r, int n) { store(o + r * kWidth + n * kLanes<T>, x); });
    });
  }

  // The same, to the bit, without touching the values that a lane does not see.
  void add_visible_values(const Scratch& w, const T* v, int keys) const {
    for (Index d = 0; d < p_.value_width; ++d)
      for (int n = 0; n < kWidth; n += kLanes<T>) {
        Vec<T> acc = load(w.alpha + n) * load(w.o_t + d * kWidth + n);
        for (int k = 0; k < keys; ++k) {
          const Vec<T> sum = fma(splat(v[k * p_.v.row_stride + d]), load(w.tile.s + k * kWidth + n), acc);
          acc = load_lanes<T>(w.tile.visible + k * kWidth + n) ? sum : acc;
        }
        store(w.o_t + d * kWidth + n, acc);
      }
  }

  void finish(const Scratch& w, const Site<T>& site, const Panels& panel) const {
    T* lse = result_.lse + (site.b * p_.heads + site.h) * p_.queries + panel.first;
    T* out = result_.out.at(site.b, site.h) + panel.first * result_.out.row_stride;
    const T kept = T(p_.dropout.on() ? p_.dropout.scale() : 1);
    for (int q = 0; q < panel.count; ++q, out += result_.out.row_stride) {
      const T l = w.l[q], factor = l == 0 ? 0 : kept / l;
      lse[q] = l == 0 ? -kInfinity<T> : (w.m[q] + std::log2(l)) * kLn2<T>;
      for (Index d = 0; d < p_.value_width; ++d) out[d] = w.o_t[d * kWidth + q] * factor;
    }
  }

  const Problem<T>& p_;
  ForwardResult<T> result_;
};

}  // namespace attention_ops
