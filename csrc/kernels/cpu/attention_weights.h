// Weights w = exp(s - lse) written out, or their summaries per column and row, in a second tiled pass over the scores.
// Given tangents, both give their own instead: w_dot = w (s_dot - lse_dot).
#pragma once
#include "kernels/cpu/row_norm.h"
#include "kernels/cpu/tangents.h"
#include "kernels/cpu/weight_gradient.h"
#include "kernels/cpu/weight_rows.h"

namespace attention_ops {

// What both kernels do with one panel: transposed queries, scores, and dot.s := the tangent of log w.
template <class T>
class WeightTiles {
 public:
  static constexpr int kVectors = kRegisterVectors, kStep = kLanes<T>;
  using Panels = Panel<T>;
  static constexpr int kWidth = Panels::kWidth;

  WeightTiles(const Problem<T>& p, const T* lse, const Tangents<T>* along, Pieces& pieces)
      : p_(p), lse_(lse), along_(along) {
    pieces(q_t_, p.width * kWidth);
    pieces(norm_.base, kWidth), pieces(norm_.log2_l, kWidth);
    tile_.take(pieces, p, kWidth, /*derivatives=*/along_);
    if (!along_) return;
    if (along_->q.data) pieces(q_dot_t_, p.width * kWidth);
    pieces(lse_dot_, kWidth);
    dot_.take(pieces, p, *along_, kWidth, /*second=*/false);
  }

  const ScoreTile<T>& tile() const { return tile_; }
  void start(const Site<T>& site, Panels& panel) {
    panel_to_lanes(q_t_, p_.q, site, panel);
    panel.q_t = q_t_;
    const Index row = (site.b * p_.heads + site.h) * p_.queries + panel.first;
    find_row_norm(norm_, lse_ + row, tile_, site, panel);
    if (!along_) return;
    if (q_dot_t_) panel_to_lanes(q_dot_t_, along_->q, site, panel);
    std::fill_n(lse_dot_, kWidth, T(0));
    if (along_->lse) std::copy_n(along_->lse + row, panel.count, lse_dot_);
  }
  // False for a tile without a visible element.
  bool step(const Site<T>& site, const Panels& panel, Index key, int keys) {
    if (compute_scores(tile_, site, panel, key, keys) == Cover::none) return false;
    visited_tiles.fetch_add(1, std::memory_order_relaxed);
    if (!along_) return true;
    compute_tangents(dot_, tile_, site, panel, *along_, q_dot_t_, key, keys);
    each_vector<T, kWidth>(tile_,
                           [&](Index n, int lane) { store(dot_.s + n, load(dot_.s + n) - load(lse_dot_ + lane)); });
    return true;
  }

  // Of 0 where masked, also of a row that is NaN.
  Vec<T> log2_weights(Index n, int lane) const {
    const Vec<T> s = load(tile_.s + n);
    return s == splat(-kInfinity<T>) ? s : norm_.log2_weight(s, lane);
  }
  // w, or w_dot: 0 where w is, since masked places may hold anything.
  Vec<T> moved(Vec<T> w, Index n) const { return along_ ? w == Vec<T>{} ? w : w * load(dot_.s + n) : w; }
  bool moves() const { return along_; }

 private:
  void panel_to_lanes(T* to, const Matrices<const T>& q, const Site<T>& site, const Panels& panel) const {
    const T* rows = q.at(site.b, site.h) + panel.first * q.row_stride;
    rows_to_lanes(to, kWidth, rows, q.row_stride, panel.count, p_.width, p_.query_factor());
  }

  const Problem<T>& p_;
  const T* lse_;
  const Tangents<T>* along_;
  T *q_t_ = nullptr, *q_dot_t_ = nullptr, *lse_dot_ = nullptr;
  RowNorm<T> norm_;
  ScoreTile<T> tile_;
  TangentTile<T> dot_;
};

// The weights, or their tangents, written to rows of their own.
template <class T>
class AttentionWeights {
 public:
  AttentionWeights(const Problem<T>& p, const T* lse, const Tensor4& out, bool average,
                   const Tangents<T>* along = nullptr)
      : p_(p), lse_(lse), along_(along), rows_(p, out, average) {}

  Index tasks() const { return rows_.tasks(); }
  size_t scratch_bytes() const {
    Pieces count;
    Tiles tiles(p_, lse_, along_, count);
    Scratch().take(count, p_, rows_);
    return count.bytes;
  }
  void run(Index task, Arena& arena) const {
    Pieces pieces(&arena);
    Tiles tiles(p_, lse_, along_, pieces);
    Scratch w;
    w.take(pieces, p_, rows_);
    std::fill_n(w.weights, kWidth * p_.keys, T(0)), std::fill_n(w.seen, rows_.tiles(), rows_.average());
    std::fill_n(w.factors, kWidth, rows_.average() ? T(1) / T(p_.heads) : T(1));
    auto part = rows_.part(task);
    for (Index h = part.first; h < part.last; ++h) {
      const Site<T> site(p_, part.b, h);
      tiles.start(site, part.panel);
      for (Index key = 0; key < p_.keys; key += kTileKeys) {
        const int keys = int(std::min<Index>(kTileKeys, p_.keys - key));
        if (!tiles.step(site, part.panel, key, keys)) continue;
        w.seen[key / kTileKeys] = true;
        add(w.weights + key * kWidth, tiles);
      }
    }
    rows_.write(w.weights, w.factors, w.seen, part);
  }

 private:
  using Tiles = WeightTiles<T>;
  static constexpr int kWidth = Tiles::kWidth;

  struct Scratch {
    T *weights = nullptr, *factors = nullptr;
    bool* seen = nullptr;

    void take(Pieces& pieces, const Problem<T>& p, const WeightRows<T>& rows) {
      pieces(weights, kWidth * p.keys), pieces(factors, kWidth), pieces(seen, rows.tiles());
    }
  };

  void add(T* weights, const Tiles& tiles) const {
    each_vector<T, kWidth>(tiles.tile(), [&](Index n, int lane) {
      store(weights + n, load(weights + n) + tiles.moved(exp2<T>(tiles.log2_weights(n, lane)), n));
    });
  }

  const Problem<T>& p_;
  const T* lse_;
  const Tangents<T>* along_;
  WeightRows<T> rows_;
};

template <class T>
struct Summaries {
  T *column_sum, *entropy, *maximum;  // [B, H, Lk], [B, H, Lq], [B, H, Lq]
  int64_t* argmax;                    // [B, H, Lq], the first key of the largest weight; null with tangents
};

// A task is a group of panels of one head; column sums of the groups, a vector for each key, are added in their order
// afterwards.
template <class T>
class AttentionSummaries {
 public:
  AttentionSummaries(const Problem<T>& p, const T* lse, const Summaries<T>& result, const Tangents<T>* along = nullptr)
      : p_(p),
        lse_(lse),
        along_(along),
        result_(result),
        panels_(Tiles::Panels::number(p.queries)),
        groups_(std::clamp<Index>(16 / std::max<Index>(p.batch * p.heads, 1), 1, std::max<Index>(panels_, 1))),
        memory_(Arena::rounded<T>(groups_ * columns() * kStep)),
        sums_(memory_.template take<T>(groups_ * columns() * kStep)) {}

  Index tasks() const { return groups_ * p_.batch * p_.heads; }
  size_t scratch_bytes() const {
    Pieces count;
    Tiles(p_, lse_, along_, count);
    return count.bytes;
  }
  void run(Index task, Arena& arena) const {
    Pieces pieces(&arena);
    Tiles tiles(p_, lse_, along_, pieces);
    const Index bh = task % (p_.batch * p_.heads), group = task / (p_.batch * p_.heads);
    const Site<T> site(p_, bh / p_.heads, bh % p_.heads);
    T* sums = sums_ + (group * columns() + bh * p_.keys) * kStep;
    std::fill_n(sums, p_.keys * kStep, T(0));
    for (Index n = panels_ * group / groups_; n < panels_ * (group + 1) / groups_; ++n) {
      typename Tiles::Panels panel(p_, n);
      tiles.start(site, panel);
      run_panel(tiles, site, panel, sums);
    }
  }
  Index finish_tasks() const { return p_.batch * p_.heads; }
  void finish(Index bh) const {
    for (Index j = bh * p_.keys; j < (bh + 1) * p_.keys; ++j) {
      Vec<T> sum{};
      for (Index g = 0; g < groups_; ++g) sum += load(sums_ + (g * columns() + j) * kStep);
      result_.column_sum[j] = sum_lanes<T>(sum);
    }
  }

 private:
  using Tiles = WeightTiles<T>;
  static constexpr int kVectors = Tiles::kVectors, kStep = Tiles::kStep, kWidth = Tiles::kWidth;

  struct Rows {  // in lanes
    Vec<T> entropy{}, best{}, best_dot{};
    Ints<T> place{};
  };

  Index columns() const { return p_.batch * p_.heads * p_.keys; }

  void run_panel(Tiles& tiles, const Site<T>& site, const typename Tiles::Panels& panel, T* sums) const {
    Rows rows[kVectors];
    alignas(kVectorBytes) LaneInt<T> real[kWidth];
    for (int q = 0; q < kWidth; ++q) real[q] = q < panel.count ? -1 : 0;
    for (Index key = 0; key < p_.keys; key += kTileKeys) {
      const int keys = int(std::min<Index>(kTileKeys, p_.keys - key));
      if (tiles.step(site, panel, key, keys))
        each_span(tiles.tile(), [&](auto vectors, const Span& span) {
          add_span<vectors>(rows + span.vector, tiles, span, key, real + span.vector * kStep, sums + key * kStep);
        });
    }
    const Index first = (site.b * p_.heads + site.h) * p_.queries + panel.first;
    for (int q = 0; q < panel.count; ++q) {
      const Rows& of = rows[q / kStep];
      result_.entropy[first + q] = of.entropy[q % kStep] * -kLn2<T>;
      result_.maximum[first + q] = (along_ ? of.best_dot : of.best)[q % kStep];
      if (result_.argmax) result_.argmax[first + q] = of.place[q % kStep];
    }
  }

  template <int NV>
  static void add_span(Rows* to, const Tiles& tiles, const Span span, Index key, const LaneInt<T>* real, T* sums) {
    Rows rows[NV];
    for (int v = 0; v < NV; ++v) rows[v] = to[v];
    for (int k = span.key; k < span.key + span.keys; ++k) {
      Vec<T> sum = load(sums + k * kStep);
      for (int v = 0; v < NV; ++v) {
        const Vec<T> w = add_weights(rows[v], tiles, k, (span.vector + v) * kStep, key);
        sum += load_lanes<T>(real + v * kStep) ? w : Vec<T>{};
      }
      store(sums + k * kStep, sum);
    }
    for (int v = 0; v < NV; ++v) to[v] = rows[v];
  }

  // Takes a vector of the tile's key k into its rows' summaries; gives its weights, or their tangents. That of -w log w
  // is -w_dot (log w + 1).
  static Vec<T> add_weights(Rows& rows, const Tiles& tiles, int k, int lane, Index key) {
    const Index n = Index(k) * kWidth + lane;
    const Vec<T> x = tiles.log2_weights(n, lane), w = exp2<T>(x), moved = tiles.moved(w, n);
    const Vec<T> log2_w = tiles.moves() ? x + splat(kLog2e<T>) : x;
    rows.entropy += x < splat(Exp2Constants<T>::low) ? Vec<T>{} : moved * log2_w;
    const Ints<T> better = ((w > rows.best) | (w != w)) & (rows.best == rows.best);
    rows.best = better ? w : rows.best;
    rows.best_dot = better ? moved : rows.best_dot;
    rows.place = better ? LaneInt<T>(key + k) - Ints<T>{} : rows.place;
    return moved;
  }

  const Problem<T>& p_;
  const T* lse_;
  const Tangents<T>* along_;
  Summaries<T> result_;
  Index panels_, groups_;
  Arena memory_;
  T* sums_;
};

// d loss / d w given as a tensor, or as the gradient of its mean over heads; and its tangent.
template <class T>
class DenseGradient final : public WeightGradient<T> {
  static constexpr int kWidth = Panel<T>::kWidth;

 public:
  DenseGradient(const Tensor4& grad, T factor, const Tensor4& grad_dot = {})
      : grad_(grad), grad_dot_(grad_dot), factor_(factor) {}
  void fill(T* dp, const GradientTile<T>& t) const override { copy(dp, grad_, t); }
  void fill_tangent(T* dp_dot, const GradientTile<T>& t) const override { copy(dp_dot, grad_dot_, t); }

 private:
  void copy(T* to, const Tensor4& grad, const GradientTile<T>& t) const {
    std::fill_n(to, Index(t.keys) * kWidth, T(0));
    if (!grad.defined()) return;
    with_element(grad.element, [&]<class E>(E*) {
      const E* first = static_cast<const E*>(grad.data) + t.b * grad.strides[0] + t.h * grad.strides[1] +
                       t.row * grad.strides[2] + t.key * grad.strides[3];
      each_vector<T, kWidth>(t.scores, [&](Index n, int lane) {
        const E* column = first + n / kWidth * grad.strides[3];
        for (int q = lane; q < std::min(lane + kLanes<T>, t.rows); ++q)
          to[n - lane + q] = factor_ * convert<T>(column[q * grad.strides[2]]);
      });
    });
  }

  Tensor4 grad_, grad_dot_;
  T factor_;
};

// d loss / d w = grad_column_sum_j - grad_entropy_i (log w + 1) + grad_maximum_i [j = argmax_i]; each may be absent.
template <class T>
struct SummaryGradients {
  const T *column_sum = nullptr, *entropy = nullptr, *maximum = nullptr;
};

template <class T>
class SummaryGradient final : public WeightGradient<T> {
  static constexpr int kWidth = Panel<T>::kWidth;

 public:
  SummaryGradient(const Problem<T>& p, const int64_t* argmax, const SummaryGradients<T>& grads,
                  const SummaryGradients<T>& grads_dot = {})
      : p_(p), argmax_(argmax), grads_(grads), grads_dot_(grads_dot) {}
  bool needs_log() const override { return grads_.entropy || grads_dot_.entropy; }
  void fill(T* dp, const GradientTile<T>& t) const override { sum(dp, grads_, t); }
  void fill_tangent(T* dp_dot, const GradientTile<T>& t) const override {
    sum(dp_dot, grads_dot_, t);
    if (!grads_.entropy) return;
    const T* entropy = grads_.entropy + first_row(t);
    each_vector<T, kWidth>(t.scores, [&](Index n, int lane) {
      for (int q = lane; q < std::min(lane + kLanes<T>, t.rows); ++q)
        if (counts(t.log2_p[n - lane + q])) dp_dot[n - lane + q] -= entropy[q] * t.log_p_dot[n - lane + q];
    });
  }

 private:
  // 0 log 0 = 0, and a weight below the normal numbers is 0.
  static bool counts(T log2_w) { return !(log2_w < Exp2Constants<T>::low); }
  Index first_row(const GradientTile<T>& t) const { return (t.b * p_.heads + t.h) * p_.queries + t.row; }

  void sum(T* dp, const SummaryGradients<T>& grads, const GradientTile<T>& t) const {
    const Index row = first_row(t);
    std::fill_n(dp, Index(t.keys) * kWidth, T(0));
    each_vector<T, kWidth>(t.scores, [&](Index n, int lane) {
      const Index j = t.key + n / kWidth;
      for (int q = lane; q < std::min(lane + kLanes<T>, t.rows); ++q) {
        T& x = dp[n - lane + q];
        if (grads.column_sum) x += grads.column_sum[(t.b * p_.heads + t.h) * p_.keys + j];
        if (grads.maximum && argmax_[row + q] == j) x += grads.maximum[row + q];
        if (!grads.entropy) continue;
        const T log2_w = t.log2_p[n - lane + q];
        x -= grads.entropy[row + q] * (counts(log2_w) ? log2_w * kLn2<T> + 1 : 0);
      }
    });
  }

  const Problem<T>& p_;
  const int64_t* argmax_;
  SummaryGradients<T> grads_, grads_dot_;
};

}  // namespace attention_ops
