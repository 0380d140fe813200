// Backward, tile by tile from lse: p = exp(s - lse), dp from a source (weight_gradient.h), delta = sum_j p dp -
// grad_lse, ds = p (dp - delta), then dv += p' do, dk += ds' q, dq += ds (k + a), grad_bias += ds, and along
// diagonals dr += ds, da += ds' q, db += p' do (score.h has r, a and b by distance). Three passes: rows are prepared,
// tiles are accumulated by tasks that own their keys, partial sums are added in a fixed order. No atomics.
//
// A second derivative is the tangent of all that (tangents.h), for which the results then stand:
//   p_dot = p (s_dot - lse_dot),  ds_dot = p_dot (dp - delta) + p (dp_dot - delta_dot),  and with x as in tangents.h
//   dx = softcap'(x) ds,  dx_dot = softcap'(x) ds_dot + softcap''(x) x_dot ds,
//   dv_dot += p_dot' do + p' do_dot,  dk_dot += dx_dot' q + dx' q_dot,  dq_dot += dx_dot k + dx k_dot.
#pragma once
#include <cmath>
#include <memory>
#include <utility>

#include "kernels/cpu/backward_bias.h"
#include "kernels/cpu/backward_distance.h"
#include "kernels/cpu/backward_plan.h"
#include "kernels/cpu/dropout.h"
#include "kernels/cpu/key_columns.h"
#include "kernels/cpu/lane_products.h"
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
  static constexpr bool kTwice = std::is_same_v<T, E>;  // whether second derivatives are computed in these types

  AttentionBackward(const Problem<T, E>& problem, const BackwardInput<T, E>& input, const BackwardResult<T, E>& result,
                    const Source& source, const BackwardTangent<T>* along = nullptr)
      : p_(problem),
        in_(input),
        along_(along),
        result_(result),
        source_(source),
        plan_(problem, result, Panels::number(problem.queries)),
        bias_(problem, result, plan_),
        distance_(problem, result.grad_distance, plan_),
        columns_(problem.k, problem.batch, problem.key_heads, problem.keys, problem.width) {
    Pieces count;
    take_shared(count);
    memory_ = std::make_shared<Arena>(count.bytes);
    Pieces pieces(memory_.get());
    take_shared(pieces);
    if (sums_.bias) bias_.use_sums(sums_.bias);
  }

  // All gradients. in_parallel(tasks, operations, scratch bytes, f) calls f(task, arena) for each task, in any order,
  // on any threads; `operations` is about what all of them cost.
  template <class Run>
  void compute(Run&& in_parallel) const;

 private:
  struct Scratch {
    T *dp = nullptr, *dp_dot = nullptr, *log2_p = nullptr, *dk = nullptr, *dv = nullptr, *bias = nullptr;
    E* rounded = nullptr;                            // p or ds as an operand of products of pairs
    E *p = nullptr, *ds = nullptr, *ds_t = nullptr;  // kept for products: dv and dk of each block, dq of one panel
    Pending tiles;                                   // of that panel
    Index visited = 0;
    LaneInt<T>* keep = nullptr;
    ScoreTile<T> tile;
    TangentTile<T> dot;
  };
  // What a task owns, and the key blocks of the moment: several, so that the rows of a panel serve all of them.
  struct Block {
    Index key;
    int keys;
    bool finite;  // no NaN or infinity in the rows of key, or of its tangent
    T *dk, *dv;   // [kTileKeys, padded width]
    E *p, *ds;    // [kTileKeys, kPendingLanes], of the panels
    Pending panels;
  };
  static constexpr Index kPending = kPaired<E> ? kPairTiles : 0, kPendingLanes = kPending * kWidth;
  struct Places {
    E *p, *ds, *ds_t;
  };
  static constexpr int kBlocks = 4;
  struct Work {
    Index owner, key_group, query_group;
    int blocks = 0;
    Block block[kBlocks]{};
  };
  // What one tile sums into the gradients: p into dv with the rows of grad_out, ds into dk and dq with those of query
  // and key. A second derivative sums two: the moved weights with the rows, and the weights with the moved rows.
  using Rows = RowPanels<E, kWidth>;
  struct Term {
    T *p, *ds;
    Matrices<const E> q, k, grad_out;
    const Rows& rows;
    const DistanceTable<T>& distance;
  };
  int blocks_at_a_time() const { return bias_.gathers_blocks() ? 1 : kBlocks; }

  void take(Scratch& w, Pieces& pieces) const {
    const Index size = Index(kTileKeys) * kWidth;
    w.tile.take(pieces, p_, kWidth, /*derivatives=*/true);
    w.tile.ahead = {kWidth, 0};  // the same keys for the next panel
    pieces(w.dp, size);
    if constexpr (kTwice)
      if (along_) w.dot.take(pieces, p_, along_->of, kWidth, /*second=*/true), pieces(w.dp_dot, size);
    if (kPaired<E>) pieces(w.rounded, size);
    pieces(w.p, blocks_at_a_time() * kPending * size), pieces(w.ds, blocks_at_a_time() * kPending * size);
    pieces(w.ds_t, kPending * size);
    if (source_.needs_log()) pieces(w.log2_p, size);
    if (p_.dropout.on()) pieces(w.keep, size);
    if (result_.grad_key.data) pieces(w.dk, blocks_at_a_time() * kTileKeys * padded(p_.width));
    if (result_.grad_value.data) pieces(w.dv, blocks_at_a_time() * kTileKeys * padded(p_.value_width));
    pieces(w.bias, bias_.scratch_size());
  }
  void take_shared(Pieces& pieces) {
    if (!is_local()) take_rows(pieces);
    sums_.take(pieces, p_, result_, plan_);
    distance_.take(pieces);
    if (result_.grad_query.data) columns_.take(pieces);
  }
  void take_rows(Pieces& pieces) { shared_.take(pieces, p_, result_, plan_, heads_, source_.has_values(), along_); }

  // One task then does all three passes for its owner, whose rows lie in the thread's memory and stay in its cache.
  bool is_local() const { return plan_.is_local() && !BackwardSums<T, E>::bias_broadcasts(result_); }
  AttentionBackward of_owner(Index owner, Pieces& pieces) const {
    AttentionBackward local(*this);
    const auto [first_batch, last_batch] = plan_.batches_of(owner, p_);
    const auto [first_head, last_head] = plan_.key_heads_of(owner, p_);
    local.heads_ = {first_batch, first_head * p_.group(), last_batch - first_batch,
                    (last_head - first_head) * p_.group()};
    local.take_rows(pieces);
    return local;
  }
  size_t owner_bytes() const {
    Pieces count;
    of_owner(0, count);
    return count.bytes;
  }
  Index pack_tasks() const { return result_.grad_query.data ? columns_.tasks() : 0; }
  Index prepare_tasks() const { return p_.batch * p_.heads * plan_.panels; }
  Index finish_tasks() const { return prepare_tasks() + (plan_.query_groups() > 1 ? key_tasks() : 0) + 1; }
  size_t prepare_bytes() const {
    ScoreTile<T> tile;
    Pieces count;
    tile.take(count, p_, kWidth, /*derivatives=*/false);
    return count.bytes;
  }
  size_t scratch_bytes() const {
    Scratch scratch;
    Pieces count;
    take(scratch, count);
    return count.bytes;
  }
  void prepare(Index task, Arena& arena) const;
  void run(Index task, Arena& arena) const;
  void run_owner(Index task, Arena& arena) const;
  void finish(Index task) const;
  void finish_shared() const;

  static Index padded(Index width) { return round_up(width, kStep); }
  Index key_tasks() const { return p_.batch * p_.key_heads * plan_.key_blocks; }
  Index head(Index b, Index h) const { return b * p_.heads + h; }
  Index row_of(Index b, Index h, Index panel) const { return (heads_.number(b, h) * plan_.panels + panel) * kWidth; }
  Index dq_width() const { return round_up(p_.width, kRowUnit<E>); }
  T* dq_panel(Index group, Index row) const { return shared_.dq_t + (group * all_rows() + row) * dq_width(); }
  // Null where there are no such rows.
  E* q_panel(const Rows& rows, Index row) const {
    return rows.q_t ? rows.q_t + row * round_up(p_.width, kDepthUnit<E>) : nullptr;
  }
  E* do_panel(const Rows& rows, Index row) const {
    return rows.do_t ? rows.do_t + row * round_up(p_.value_width, kDepthUnit<E>) : nullptr;
  }
  T* row_sums(Index group, Index row) const { return shared_.row_sums + group * all_rows() + row; }
  bool& summed(Index group, Index row) const { return shared_.summed[(group * all_rows() + row) / kWidth]; }
  Index all_rows() const { return heads_.count() * plan_.panels * kWidth; }

  bool prepare_rows(const Rows& to, const Matrices<const E>& q, const Matrices<const E>& grad_out,
                    const Site<T, E>& site, const Panels& panel, Index row) const;
  void pad_rows(E* to, const E* from, Index stride, int rows, Index width) const;
  void row_terms(const Site<T, E>& site, const Panels& panel, Index row) const;
  bool is_finite(const Matrices<const E>& keys, Index b, Index hk, const Block& block) const {
    return all_finite<T>(keys.at(b, hk) + block.key * keys.row_stride, keys.row_stride, block.keys, p_.width);
  }
  bool is_finite(const Block& block, Index row) const { return block.finite && shared_.finite[row / kWidth]; }
  PaddedRows<E> rows_of(const E* padded_rows, const Matrices<const E>& natural, Index b, Index h, Index panel,
                        Index width) const;
  void run_blocks(Work& work, Scratch& w) const;
  void run_head(Work& work, Scratch& w, Index b, Index h) const;
  void run_tile(const Work& work, Block& block, Scratch& w, const Site<T, E>& site, const Panels& panel,
                Index number) const;
  void begin_sums(Index key_group, Index row) const;
  void compute_weights(const Block& block, Scratch& w, const Site<T, E>& site, const Panels& panel, Index row) const;
  void compute_tangent(const Block& block, Scratch& w, const Site<T, E>& site, const Panels& panel, Index row) const;
  void fill_gradients(const Block& block, Scratch& w, const Site<T, E>& site, const Panels& panel, Index row) const;
  void score_gradient(const Scratch& w, Index row, int rows) const;
  void drop(T* x, Ints<T> kept) const { store(x, kept ? splat(T(p_.dropout.scale)) * load(x) : Vec<T>{}); }
  void through_softcap(const Scratch& w) const;
  void add_terms(const Work& work, Block& block, Scratch& w, const Site<T, E>& site, const Panels& panel,
                 Index number) const;
  void add_tile(const Term& term, const Work& work, Block& block, Scratch& w, const Site<T, E>& site,
                const Panels& panel, Index number) const;
  static bool is_whole(const ScoreTile<T>& tile) {
    const Span& span = tile.spans[0];
    return span.keys == kTileKeys && span.vectors == Panels::kVectors;
  }
  bool run_plain_pairs(const Work& work, Block& block, Scratch& w, const Site<T, E>& site, const Panels& panel,
                       Index number) const;
  Places places(const Work& work, Block& block, Scratch& w, const Site<T, E>& site, Index number) const;
  void defer(const Term& term, const Work& work, Block& block, Scratch& w, const Site<T, E>& site, Index number) const;
  void add_pending_to_keys(Block& block, const Site<T, E>& site) const;
  void add_pending_to_queries(const Work& work, Scratch& w, const Site<T, E>& site, Index number) const;
  void add_visible(const Term& term, const Work& work, const Block& block, const Scratch& w, const Site<T, E>& site,
                   const Panels& panel, Index row) const;
  void add_by_distance(const Term& term, const Work& work, const Block& block, const Scratch& w, const Site<T, E>& site,
                       const Panels& panel, Index number) const;
  template <int NV>
  void add_to_keys(T* out, const Scratch& w, const T* a, const PaddedRows<E>& b, Index width, const Span& span,
                   int rows) const;
  template <int NV>
  void add_to_queries(T* dq, const Scratch& w, const Term& term, const Site<T, E>& site, Index key,
                      const Span& span) const;
  void add_visible_to_keys(T* out, const T* a, const PaddedRows<E>& b, Index width, const Span& span, int rows,
                           const LaneInt<T>* visible) const;
  void store_keys(const Work& work, const Block& block, Index b, Index hk) const;
  void finish_panel(Index task) const;
  void finish_keys(Index task) const;
  void finish_sinks() const;

  const Problem<T, E>& p_;
  BackwardInput<T, E> in_;
  const BackwardTangent<T>* along_;  // null in a first derivative
  BackwardResult<T, E> result_;
  const Source& source_;
  BackwardPlan plan_;
  BackwardBias<T, kWidth> bias_;
  BackwardDistance<T, E> distance_;
  BackwardHeads heads_{0, 0, p_.batch, p_.heads};  // those with rows in `shared_`
  BackwardShared<T, E, kWidth> shared_;
  BackwardSums<T, E> sums_;
  KeyColumns<E> columns_;
  std::shared_ptr<Arena> memory_;
};

}  // namespace attention_ops

#include "kernels/cpu/attention_backward_pairs.h"
#include "kernels/cpu/attention_backward_passes.h"
#include "kernels/cpu/attention_backward_tile.h"
