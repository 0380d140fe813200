// The gradient of rows by distance. A task adds what its tiles give to sums of its own, which begin where it first adds
// to them; afterwards those of all tasks, and of the batches and heads that share a table, are added in a fixed order.
#pragma once
#include "kernels/cpu/backward_plan.h"
#include "kernels/cpu/score.h"

namespace attention_ops {

template <class T, class E>
class BackwardDistance {
 public:
  using Panels = Panel<T, E>;
  static constexpr int kWidth = Panels::kWidth, kStep = kLanes<T>;

  BackwardDistance(const Problem<T, E>& p, const DistanceGradient<T>& grad, const BackwardPlan& plan)
      : p_(p),
        grad_(grad),
        groups_(plan.key_groups * plan.query_groups()),
        query_groups_(plan.query_groups()),
        heads_(grad.heads == 1 ? p.key_heads : p.heads) {}

  bool on() const { return grad_.data && rows() > 0; }
  void take(Pieces& pieces) {
    if (!on()) return;
    const Index tables = groups_ * p_.batch * heads_;
    pieces(begun_, tables * blocks());
    pieces(bias_, tables * rows());
    if (row_size()) pieces(sums_, tables * rows() * row_size());
  }
  // Comes before any task adds to this head.
  void clear(Index b, Index h) const {
    if (!on()) return;
    for (Index group = 0; group < groups_; ++group)
      std::fill_n(begun_ + table(group, b, h) * blocks(), blocks(), false);
  }

  // The number of a task's sums of one head.
  Index sums(Index key_group, Index query_group, Index b, Index h) const {
    return table(key_group * query_groups_ + query_group, b, h);
  }

  // r += ds summed along the diagonals of a tile.
  void add_bias(Index to, const ScoreTile<T>& tile, const T* ds, const Panels& panel, Index key, int keys) const {
    T diagonals[kTileKeys + kWidth]{};
    each_vector<T, kWidth>(tile, [&](Index n, int lane) {
      T* sum = diagonals + lane - n / kWidth + keys - 1;
      store(sum, load(sum) + load(ds + n));
    });
    const Index last = key + keys - 1 - panel.first + p_.queries - 1, first = last - (keys + panel.count - 2);
    begin(to, first, last);
    T* row = bias_ + to * rows();
    for (Index n = first; n <= last; ++n) row[n] += diagonals[last - n];
  }

  // a += dx' q, and b += p' do: what is spread in `skew` times x, into the sums from column c on.
  void add_rows(Index to, Index c, Index width, const Skew<T>& skew, const SkewBlock& block, const PaddedRows<T>& x,
                bool clean) const {
    const Index first = block.first + block.skipped();
    begin(to, first, block.first + block.rows - 1);
    skew.add_to_rows(sums_ + (to * rows() + first) * row_size() + c, row_size(), x, width, clean, block);
  }

  Index finish_tasks() const { return on() ? grad_.batches * grad_.heads * blocks() : 0; }
  void finish(Index task) const {
    const Index block = task % blocks(), shared = task / blocks();
    const Index b = shared / grad_.heads, h = shared % grad_.heads;
    const Index first_batch = grad_.batches == 1 ? 0 : b, last_batch = grad_.batches == 1 ? p_.batch : b + 1;
    const Index first_head = grad_.heads == 1 ? 0 : h, last_head = grad_.heads == 1 ? heads_ : h + 1;
    const Index first = block * kBlock, last = std::min(first + kBlock, rows());
    T* out = grad_.data + (shared * rows() + first) * columns();
    std::fill_n(out, (last - first) * columns(), T(0));
    for (Index batch = first_batch; batch < last_batch; ++batch)
      for (Index head = first_head; head < last_head; ++head)
        for (Index group = 0; group < groups_; ++group)
          if (const Index from = (group * p_.batch + batch) * heads_ + head; begun_[from * blocks() + block])
            for (Index n = first; n < last; ++n) add_row(out + (n - first) * columns(), from * rows() + n);
  }

 private:
  static constexpr Index kBlock = 64;  // rows that begin together

  static Index padded(Index width) { return round_up(width, kStep); }
  Index rows() const { return p_.queries && p_.keys ? p_.queries + p_.keys - 1 : 0; }
  Index blocks() const { return (rows() + kBlock - 1) / kBlock; }
  Index columns() const { return 1 + key_width() + (p_.distance.has_values ? p_.value_width : 0); }
  Index key_width() const { return p_.distance.has_keys ? p_.width : 0; }
  Index row_size() const {
    return p_.distance.has_values ? padded(p_.width) + padded(p_.value_width) : padded(key_width());
  }
  Index table(Index group, Index b, Index h) const {
    return (group * p_.batch + b) * heads_ + (grad_.heads == 1 ? h / p_.group() : h);
  }

  void begin(Index to, Index first, Index last) const {
    for (Index block = first / kBlock; block <= last / kBlock; ++block) {
      bool& begun = begun_[to * blocks() + block];
      if (begun) continue;
      begun = true;
      const Index row = to * rows() + block * kBlock, count = std::min(kBlock, rows() - block * kBlock);
      std::fill_n(bias_ + row, count, T(0));
      if (sums_) std::fill_n(sums_ + row * row_size(), count * row_size(), T(0));
    }
  }
  void add_row(T* out, Index row) const {
    out[0] += bias_[row];
    if (!sums_) return;
    const T *a = sums_ + row * row_size(), *b = a + padded(p_.width);
    for (Index c = 0; c < key_width(); ++c) out[1 + c] += p_.scale * a[c];
    for (Index c = 0; p_.distance.has_values && c < p_.value_width; ++c) out[1 + p_.width + c] += b[c];
  }

  const Problem<T, E>& p_;
  DistanceGradient<T> grad_;
  Index groups_, query_groups_, heads_;  // a task has all query heads of a key head
  bool* begun_ = nullptr;                // [groups, B, heads, blocks]
  T* bias_ = nullptr;                    // [groups, B, heads, Lq + Lk - 1]
  T* sums_ = nullptr;                    // [groups, B, heads, Lq + Lk - 1, row size]
};

}  // namespace attention_ops
