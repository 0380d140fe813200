// Backward, tile by tile from lse: p = exp(s - lse), dp from a source (weight_gradient.h), delta = sum_j p dp -
// grad_lse, ds = p (dp - delta), then dv += p' do, dk += ds' q, dq += ds k, grad_bias += ds. Three passes: rows are
// prepared, tiles are accumulated by tasks that own their keys, partial sums are added in a fixed order. No atomics.
#pragma once
#include <cmath>

#include "kernels/cpu/backward_bias.h"
#include "kernels/cpu/backward_plan.h"
#include "kernels/cpu/key_columns.h"
#include "kernels/cpu/weight_gradient.h"

namespace attention_ops {

// The rows' side of a backward pass. For attention: out, lse, grad_out and grad_lse. For weights: lse alone.
template <class T, class E = T>
struct BackwardInput {
  Matrices<const E> out, grad_out;  // [B, H, Lq, Dv]
  const T *lse = nullptr, *grad_lse = nullptr;
};

template <class T, class E = T>
class AttentionBackward {
 public:
  using Panels = Panel<T, E>;
  static constexpr int kWidth = Panels::kWidth, kStep = kLanes<T>;
  using Source = WeightGradient<T, E>;

  AttentionBackward(const Problem<T, E>& problem, const BackwardInput<T, E>& input, const BackwardResult<T, E>& result,
                    const Source& source)
      : p_(problem),
        in_(input),
        result_(result),
        source_(source),
        plan_(problem, result, Panels::number(problem.queries)),
        bias_(problem, result, plan_),
        columns_(problem.k, problem.batch, problem.key_heads, problem.keys, problem.width),
        memory_(shared_bytes()) {
    Pieces pieces(&memory_);
    shared_.take(pieces, p_, result_, plan_, source_.has_values());
    if (shared_.bias_sums) bias_.use_sums(shared_.bias_sums);
  }

  // Come first, in any order.
  Index pack_tasks() const { return columns_.tasks(); }
  void pack(Index task) const { columns_.pack(task); }
  Index prepare_tasks() const { return p_.batch * p_.heads * plan_.panels; }
  size_t prepare_bytes() const {
    ScoreTile<T> tile;
    Pieces count;
    tile.take(count, p_, kWidth, /*backward=*/false);
    return count.bytes;
  }
  void prepare(Index task, Arena& arena) const;
  Index tasks() const { return plan_.tasks(); }
  size_t scratch_bytes() const {
    Scratch scratch;
    Pieces count;
    take(scratch, count);
    return count.bytes;
  }
  void run(Index task, Arena& arena) const;
  Index finish_tasks() const { return prepare_tasks() + (plan_.query_groups > 1 ? key_tasks() : 0) + 1; }
  void finish(Index task) const;

 private:
  struct Scratch {
    T *dp = nullptr, *log2_p = nullptr, *dk = nullptr, *dv = nullptr, *bias = nullptr;
    E* rounded = nullptr;  // p or ds as an operand of products of pairs
    Index visited = 0;
    LaneInt<T>* keep = nullptr;
    ScoreTile<T> tile;
  };
  // What a task owns, and the key blocks of the moment: several, so that the rows of a panel serve all of them.
  struct Block {
    Index key;
    int keys;
    bool finite;  // no NaN or infinity in the rows of key
    T *dk, *dv;   // [kTileKeys, padded width]
  };
  static constexpr int kBlocks = 4;
  struct Work {
    Index owner, key_group, query_group;
    int blocks = 0;
    Block block[kBlocks]{};
  };
  int blocks_at_a_time() const { return bias_.on() ? 1 : kBlocks; }  // the bias gathers one block

  void take(Scratch& w, Pieces& pieces) const {
    const Index size = Index(kTileKeys) * kWidth;
    w.tile.take(pieces, p_, kWidth, /*backward=*/true);
    pieces(w.dp, size);
    if (kPaired<E>) pieces(w.rounded, size);
    if (source_.needs_log()) pieces(w.log2_p, size);
    if (p_.dropout.on()) pieces(w.keep, size);
    if (result_.grad_key.data) pieces(w.dk, blocks_at_a_time() * kTileKeys * padded(p_.width));
    if (result_.grad_value.data) pieces(w.dv, blocks_at_a_time() * kTileKeys * padded(p_.value_width));
    pieces(w.bias, bias_.scratch_size());
  }
  size_t shared_bytes() const {
    BackwardShared<T, E, kWidth> shared;
    Pieces count;
    shared.take(count, p_, result_, plan_, source_.has_values());
    return count.bytes;
  }

  static Index padded(Index width) { return round_up(width, kStep); }
  Index key_tasks() const { return p_.batch * p_.key_heads * plan_.key_blocks; }
  Index head(Index b, Index h) const { return b * p_.heads + h; }
  Index row_of(Index b, Index h, Index panel) const { return (head(b, h) * plan_.panels + panel) * kWidth; }
  Index dq_width() const { return round_up(p_.width, kRowUnit<E>); }
  T* dq_panel(Index group, Index row) const { return shared_.dq_t + (group * all_rows() + row) * dq_width(); }
  E* q_panel(Index row) const { return shared_.q_t + row * round_up(p_.width, kDepthUnit<E>); }
  E* do_panel(Index row) const { return shared_.do_t + row * round_up(p_.value_width, kDepthUnit<E>); }
  T* row_sums(Index group, Index row) const { return shared_.row_sums + group * all_rows() + row; }
  Index all_rows() const { return p_.batch * p_.heads * plan_.panels * kWidth; }

  void pad_rows(E* to, const E* from, Index stride, int rows, Index width) const;
  PaddedRows<E> rows_of(const E* padded_rows, const Matrices<const E>& natural, Index b, Index h, Index panel,
                        Index width) const;
  void clear_rows(const Work& work) const;
  void run_blocks(Work& work, Scratch& w) const;
  void run_head(const Work& work, Scratch& w, Index b, Index h) const;
  void run_tile(const Work& work, const Block& block, Scratch& w, const Site<T, E>& site, const Panels& panel,
                Index number) const;
  void add_tile(const Work& work, const Block& block, const Scratch& w, const Site<T, E>& site, const Panels& panel,
                Index number) const;
  void compute_weights(const Block& block, Scratch& w, const Site<T, E>& site, const Panels& panel, Index row) const;
  void score_gradient(const Scratch& w, Index row, int rows) const;
  void add_visible(const Work& work, const Block& block, const Scratch& w, const Site<T, E>& site, const Panels& panel,
                   Index row) const;
  template <int NV>
  void add_to_keys(T* out, const Scratch& w, const T* a, const PaddedRows<E>& b, Index width, const Span& span,
                   int rows) const;
  template <int NV>
  void add_to_queries(T* dq, const Scratch& w, const Site<T, E>& site, Index key, const Span& span) const;
  void add_visible_to_keys(T* out, const T* a, const PaddedRows<E>& b, Index width, const Span& span, int rows,
                           const LaneInt<T>* visible) const;
  void add_visible_to_queries(T* dq, const PaddedRows<E>& k, const T* ds, const Span& span,
                              const LaneInt<T>* visible) const;
  void store_keys(const Work& work, const Block& block, Index b, Index hk) const;
  void finish_panel(Index task) const;
  void finish_keys(Index task) const;
  void finish_sinks() const;

  const Problem<T, E>& p_;
  BackwardInput<T, E> in_;
  BackwardResult<T, E> result_;
  const Source& source_;
  BackwardPlan plan_;
  BackwardBias<T, kWidth> bias_;
  BackwardShared<T, E, kWidth> shared_;
  KeyColumns<E> columns_;
  Arena memory_;
};

}  // namespace attention_ops

#include "kernels/cpu/attention_backward_passes.h"
