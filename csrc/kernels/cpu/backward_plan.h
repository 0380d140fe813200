// How the backward pass is cut into tasks, and the memory its passes share. All of it depends on shapes alone, never on
// the number of threads, so that results are the same bits for any number of them.
#pragma once
#include <utility>

#include "kernels/cpu/row_norm.h"
#include "kernels/cpu/row_turn.h"
#include "kernels/cpu/tangents.h"

namespace attention_ops {

// Of the whole table, [batches or 1, heads or 1, Lq + Lk - 1, columns].
template <class T>
struct DistanceGradient {
  T* data = nullptr;
  Index batches = 1, heads = 1;
};

// What a backward pass writes; a null pointer is a gradient nobody asked for.
template <class T, class E = T>
struct BackwardResult {
  Matrices<E> grad_query, grad_key, grad_value;
  Tensor4 grad_bias;
  DistanceGradient<T> grad_distance;
  T* grad_sinks = nullptr;          // [H]
  T* negative_rows = nullptr;       // [B, H, Lq]: minus the sum of ds over keys
  RowTurn<T> turn_query, turn_key;  // of the rows of grad_query and grad_key, where they were turned
};

// The direction of a second derivative: tangents of every input of a backward pass, and of what the forward gave. The
// results are then the tangents of the gradients.
template <class T>
struct BackwardTangent {
  Tangents<T> of;
  Matrices<const T> out, grad_out;  // [B, H, Lq, Dv]
  const T* grad_lse = nullptr;
};

// A task owns the keys of one group, for the queries of one group, of the batches and heads that share its gradients:
// one batch and key head, or all of those over which a bias is broadcast. A group of queries is some panels of some of
// the query heads of a key head, but of all where there is a bias: its gradient may be summed over them, and the bits
// of the other gradients do not depend on whether it is asked for.
struct BackwardPlan {
  static constexpr Index kTasks = 16;  // enough to keep many cores busy, few enough for partial sums to stay small

  Index batches, key_heads;  // owners along each axis
  Index key_blocks, panels, head_groups, key_groups, panel_groups;

  template <class T, class E>
  BackwardPlan(const Problem<T, E>& p, const BackwardResult<T, E>& result, Index panels)
      : batches(shares(result, 0) ? 1 : p.batch),
        key_heads(shares(result, 1) ? 1 : p.key_heads),
        key_blocks((p.keys + kTileKeys - 1) / kTileKeys),
        panels(panels),
        head_groups(p.adds() ? 1 : groups(kTasks, owners(), p.group())),
        key_groups(
            groups(kTasks, owners() * head_groups, std::max(key_blocks / 4, std::min<Index>(key_blocks / 2, 4)))),
        panel_groups(groups(kTasks, owners() * head_groups * key_groups, panels / 8)) {}

  Index query_groups() const { return head_groups * panel_groups; }
  Index tasks() const { return owners() * key_groups * query_groups(); }
  // Whether no task needs what another has prepared or summed, and there are many.
  bool is_local() const { return owners() >= kTasks && tasks() == owners(); }
  Index owners() const { return batches * key_heads; }

  // The batches, and the key heads, of one owner.
  template <class T, class E>
  std::pair<Index, Index> batches_of(Index owner, const Problem<T, E>& p) const {
    const Index first = owner / key_heads;
    return batches < p.batch ? std::pair<Index, Index>(0, p.batch) : std::pair<Index, Index>(first, first + 1);
  }
  template <class T, class E>
  std::pair<Index, Index> key_heads_of(Index owner, const Problem<T, E>& p) const {
    const Index first = owner % key_heads;
    return key_heads < p.key_heads ? std::pair<Index, Index>(0, p.key_heads)
                                   : std::pair<Index, Index>(first, first + 1);
  }

  // Runs of neighbouring blocks, which see the same rows, are dealt to and fro, which balances causal masks. Of eight
  // where every round is then whole; otherwise of as many as are gathered at a time, or fewer.
  Index group_of_block(Index block) const {
    const Index least = 2 * key_groups;
    const Index run = block / (key_blocks % (8 * least) == 0 ? 8 : std::clamp<Index>(key_blocks / least, 1, 4));
    const Index round = run / key_groups, place = run % key_groups;
    return round % 2 ? key_groups - 1 - place : place;
  }
  std::pair<Index, Index> panels_of(Index query_group) const {
    const Index group = query_group / head_groups;
    return {panels * group / panel_groups, panels * (group + 1) / panel_groups};
  }
  // Of the `heads` query heads of one key head.
  std::pair<Index, Index> heads_of(Index query_group, Index heads) const {
    const Index group = query_group % head_groups;
    return {heads * group / head_groups, heads * (group + 1) / head_groups};
  }

 private:
  template <class T, class E>
  static bool shares(const BackwardResult<T, E>& result, int axis) {
    return result.grad_bias.defined() && result.grad_bias.sizes[axis] == 1;
  }
  static Index groups(Index wanted, Index present, Index most) {
    return std::clamp<Index>((wanted + present - 1) / present, 1, std::max<Index>(most, 1));
  }
};

// Rows of query and grad_out, or of their tangents, as operands of products; null where there are none.
template <class E, int Width>
struct RowPanels {
  E *q_t = nullptr, *do_t = nullptr;  // [B, H, panels, width, Width]: panels for rows_to_panel
  // [B, H, panels * Width, padded width], where rows are not whole vectors; of bfloat16 always, as pairs of rows
  E *q_rows = nullptr, *do_rows = nullptr;

  template <class T>
  void take(Pieces& pieces, const Problem<T, E>& p, Index rows, bool has_q, bool has_do) {
    constexpr Index kPad = kLanes<T>;
    if (has_q) pieces(q_t, rows * round_up(p.width, kDepthUnit<E>));
    if (has_q && (kPaired<E> || p.width % kPad)) pieces(q_rows, rows * round_up(p.width, kPad));
    if (has_do) pieces(do_t, rows * round_up(p.value_width, kDepthUnit<E>));
    if (has_do && (kPaired<E> || p.value_width % kPad)) pieces(do_rows, rows * round_up(p.value_width, kPad));
  }
};

// Some of the batches and query heads, [B, H].
struct BackwardHeads {
  Index first_batch, first, batches, heads;

  Index count() const { return batches * heads; }
  Index number(Index b, Index h) const { return (b - first_batch) * heads + h - first; }
};

// Written by the first pass, read by the second, and partial sums of rows, written by the second, read by the third.
template <class T, class E, int Width>
struct BackwardShared {
  RowPanels<E, Width> rows, rows_dot;
  RowNorm<T> norm;                             // [B, H, panels * Width]
  T* delta = nullptr;                          // [B, H, panels * Width]
  T *delta_dot = nullptr, *lse_dot = nullptr;  // their tangents, in a second derivative
  bool* finite = nullptr;                      // [B, H, panels]: no NaN or infinity in the rows of query and grad_out
  T* dq_t = nullptr;                           // [key groups, B, H, panels, width, Width]
  T* row_sums = nullptr;                       // [key groups, B, H, panels * Width]
  bool* summed = nullptr;                      // [key groups, B, H, panels]: whether dq_t and row_sums have begun

  void take(Pieces& pieces, const Problem<T, E>& p, const BackwardResult<T, E>& r, const BackwardPlan& plan,
            const BackwardHeads& some, bool has_values, const BackwardTangent<T>* along) {
    const Index heads = some.count(), count = heads * plan.panels * Width;
    rows.take(pieces, p, count, true, has_values);
    if (along) {
      rows_dot.take(pieces, p, count, along->of.q.data, along->grad_out.data);
      pieces(delta_dot, count), pieces(lse_dot, count);
    }
    pieces(norm.base, count), pieces(norm.log2_l, count), pieces(delta, count), pieces(finite, heads * plan.panels);
    if (r.grad_query.data) pieces(dq_t, plan.key_groups * count * round_up(p.width, kRowUnit<E>));
    if (r.negative_rows) pieces(row_sums, plan.key_groups * count);
    pieces(summed, plan.key_groups * heads * plan.panels);
  }
};

// Partial sums of everything else, written by the second pass, read by the third.
template <class T, class E>
struct BackwardSums {
  T* sinks = nullptr;              // [B, H, panels]
  T *dk = nullptr, *dv = nullptr;  // [query groups, B, Hkv, Lk, padded width], where there are several
  T* bias = nullptr;               // [key groups, query groups, grad_bias], where it broadcasts over rows or columns

  void take(Pieces& pieces, const Problem<T, E>& p, const BackwardResult<T, E>& r, const BackwardPlan& plan) {
    const Index key_rows = plan.query_groups() * p.batch * p.key_heads * p.keys, lanes = kLanes<T>;
    if (r.grad_sinks) pieces(sinks, p.batch * p.heads * plan.panels);
    if (plan.query_groups() > 1 && r.grad_key.data) pieces(dk, key_rows * round_up(p.width, lanes));
    if (plan.query_groups() > 1 && r.grad_value.data) pieces(dv, key_rows * round_up(p.value_width, lanes));
    if (bias_broadcasts(r)) pieces(bias, plan.key_groups * plan.query_groups() * bias_size(r));
  }

  static bool bias_broadcasts(const BackwardResult<T, E>& r) {
    return r.grad_bias.defined() && (r.grad_bias.sizes[2] == 1 || r.grad_bias.sizes[3] == 1);
  }
  static Index bias_size(const BackwardResult<T, E>& r) {
    const Index* n = r.grad_bias.sizes;
    return n[0] * n[1] * n[2] * n[3];
  }
};

}  // namespace attention_ops
