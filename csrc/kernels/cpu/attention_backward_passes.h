// The three passes of AttentionBackward: prepare rows, go over the tiles, add partial sums.
#pragma once
#include "kernels/cpu/attention_backward.h"

namespace attention_ops {

template <class T, class E>
template <class Run>
void AttentionBackward<T, E>::compute(Run&& in_parallel) const {
  const double rows = p_.row_operations(), pairs = (along_ ? 6 : 2.5) * p_.pair_operations();
  in_parallel(pack_tasks(), rows, size_t(0), [&](Index task, Arena&) { columns_.pack(task); });
  if (is_local()) {
    in_parallel(plan_.tasks(), pairs, owner_bytes() + std::max(prepare_bytes(), scratch_bytes()),
                [&](Index task, Arena& arena) { run_owner(task, arena); });
    in_parallel(Index(1), 0.0, size_t(0), [&](Index, Arena&) { finish_shared(); });
    return in_parallel(distance_.finish_tasks(), rows, size_t(0), [&](Index task, Arena&) { distance_.finish(task); });
  }
  in_parallel(prepare_tasks(), rows, prepare_bytes(), [&](Index task, Arena& arena) { prepare(task, arena); });
  in_parallel(plan_.tasks(), pairs, scratch_bytes(), [&](Index task, Arena& arena) { run(task, arena); });
  in_parallel(finish_tasks(), rows, size_t(0), [&](Index task, Arena&) { finish(task); });
  in_parallel(distance_.finish_tasks(), rows, size_t(0), [&](Index task, Arena&) { distance_.finish(task); });
}

template <class T, class E>
void AttentionBackward<T, E>::pad_rows(E* to, const E* from, Index stride, int rows, Index width) const {
  if constexpr (kPaired<E>) return interleave_rows(to, padded(width), from, stride, rows, kWidth, width);
  for (int r = 0; r < rows; ++r, to += padded(width)) {
    std::copy_n(from + r * stride, width, to);
    std::fill(to + width, to + padded(width), E{});
  }
}

// One panel of one head; whether all of it is finite.
template <class T, class E>
bool AttentionBackward<T, E>::prepare_rows(const Rows& to, const Matrices<const E>& q,
                                           const Matrices<const E>& grad_out, const Site<T, E>& site,
                                           const Panels& panel, Index row) const {
  bool finite = true;
  const auto take = [&](E* panel_t, E* padded_rows, const Matrices<const E>& from, Index width, T factor) {
    if (!panel_t) return;
    const E* rows = from.at(site.b, site.h) + panel.first * from.row_stride;
    rows_to_panel(panel_t, kWidth, rows, from.row_stride, panel.count, width, factor);
    if (padded_rows) pad_rows(padded_rows + row * padded(width), rows, from.row_stride, panel.count, width);
    finite = finite && all_finite<T>(rows, from.row_stride, panel.count, width);
  };
  take(q_panel(to, row), to.q_rows, q, p_.width, p_.query_factor());
  take(do_panel(to, row), to.do_rows, grad_out, p_.value_width, T(1));
  return finite;
}

// First pass, one panel of one head: rows as operands, delta and lse, the sink's share.
template <class T, class E>
void AttentionBackward<T, E>::prepare(Index task, Arena& arena) const {
  const Index number = task % plan_.panels, bh = task / plan_.panels;
  [[maybe_unused]] const ProductUnit<E> unit;
  const Site<T, E> site(p_, bh / p_.heads, bh % p_.heads);
  Panels panel(p_, number);
  const Index row = row_of(site.b, site.h, number);
  bool finite = prepare_rows(shared_.rows, p_.q, in_.grad_out, site, panel, row);
  if constexpr (kTwice)
    if (along_ && !prepare_rows(shared_.rows_dot, along_->of.q, along_->grad_out, site, panel, row)) finite = false;
  shared_.finite[row / kWidth] = finite;
  ScoreTile<T> tile;
  Pieces pieces(&arena);
  tile.take(pieces, p_, kWidth, /*derivatives=*/false);
  panel.q_t = q_panel(shared_.rows, row);
  const RowNorm<T> norm{shared_.norm.base + row, shared_.norm.log2_l + row};
  find_row_norm(norm, in_.lse + bh * p_.queries + panel.first, tile, site, panel);
  row_terms(site, panel, row);
  T sink_sum = 0;
  for (int lane = 0; sums_.sinks && lane < panel.count; ++lane) {
    const T p = std::exp2(site.sink() - norm.base[lane] - norm.log2_l[lane]);  // of the sink
    if (p == 0) continue;
    const T delta = shared_.delta[row + lane], sink_dot = along_ && along_->of.sinks ? along_->of.sinks[site.h] : T(0);
    sink_sum -= p * (along_ ? (sink_dot - shared_.lse_dot[row + lane]) * delta + shared_.delta_dot[row + lane] : delta);
  }
  if (sums_.sinks) sums_.sinks[task] = sink_sum;
  if (task == 0) bias_.clear_sums();
  if (number == 0) distance_.clear(site.b, site.h);
  for (Index g = 0; g < plan_.key_groups; ++g) summed(g, row) = false;
}

// What is subtracted from the rows' dp, with the tangents; 0 past the last row.
template <class T, class E>
void AttentionBackward<T, E>::row_terms(const Site<T, E>& site, const Panels& panel, Index row) const {
  const Index first = (site.b * p_.heads + site.h) * p_.queries + panel.first;
  for (int lane = 0; lane < kWidth; lane += kStep) {
    const int count = std::clamp(panel.count - lane, 0, kStep);
    const auto products = [&](const Matrices<const E>& a, const Matrices<const E>& b) {
      if (!a.data || !b.data) return Vec<T>{};
      const auto rows = [&](const Matrices<const E>& x) {
        return PaddedRows<E>{x.at(site.b, site.h) + (panel.first + lane) * x.row_stride, x.row_stride};
      };
      return dots<T>(rows(a), rows(b), count, p_.value_width);
    };
    const auto numbers = [&](const T* x) { return x ? load_part(x + first + lane, count) : Vec<T>{}; };
    store(shared_.delta + row + lane, products(in_.out, in_.grad_out) - numbers(in_.grad_lse));
    if constexpr (kTwice)
      if (along_) {
        const Vec<T> product = products(in_.out, along_->grad_out) + products(along_->out, in_.grad_out);
        store(shared_.delta_dot + row + lane, product - numbers(along_->grad_lse));
        store(shared_.lse_dot + row + lane, numbers(along_->of.lse));
      }
  }
}

// Second pass: the key blocks of one group.
template <class T, class E>
void AttentionBackward<T, E>::run(Index task, Arena& arena) const {
  [[maybe_unused]] const ProductUnit<E> unit;
  Scratch w;
  Pieces pieces(&arena);
  take(w, pieces);
  const Index owner = task % plan_.owners(), group = task / plan_.owners();
  Work work{owner, group % plan_.key_groups, group / plan_.key_groups};
  for (Index number = 0; number < plan_.key_blocks; ++number) {
    if (plan_.group_of_block(number) != work.key_group) continue;
    Block& block = work.block[work.blocks];
    block.key = number * kTileKeys;
    block.keys = int(std::min<Index>(kTileKeys, p_.keys - block.key));
    block.dk = w.dk ? w.dk + work.blocks * kTileKeys * padded(p_.width) : nullptr;
    block.dv = w.dv ? w.dv + work.blocks * kTileKeys * padded(p_.value_width) : nullptr;
    block.p = w.p + work.blocks * kTileKeys * kPendingLanes;
    block.ds = w.ds + work.blocks * kTileKeys * kPendingLanes;
    if (++work.blocks == blocks_at_a_time()) run_blocks(work, w);
  }
  run_blocks(work, w);
  visited_tiles.fetch_add(w.visited, std::memory_order_relaxed);
}

// The gathered key blocks, over all batches and heads of their owner.
template <class T, class E>
void AttentionBackward<T, E>::run_blocks(Work& work, Scratch& w) const {
  if (work.blocks == 0) return;
  const auto [first_batch, last_batch] = plan_.batches_of(work.owner, p_);
  const auto [first_head, last_head] = plan_.key_heads_of(work.owner, p_);
  bias_.start(w.bias);
  for (Index b = first_batch; b < last_batch; ++b)
    for (Index hk = first_head; hk < last_head; ++hk) {
      for (Block* x = work.block; x < work.block + work.blocks; ++x) {
        if (x->dk) std::fill_n(x->dk, round_up(x->keys, kRowUnit<E>) * padded(p_.width), T(0));
        if (x->dv) std::fill_n(x->dv, round_up(x->keys, kRowUnit<E>) * padded(p_.value_width), T(0));
        x->finite = is_finite(p_.k, b, hk, *x);
        if constexpr (kTwice)
          if (along_ && along_->of.k.data) x->finite = x->finite && is_finite(along_->of.k, b, hk, *x);
      }
      const auto [first, last] = plan_.heads_of(work.query_group, p_.group());
      for (Index h = first; h < last; ++h) run_head(work, w, b, hk * p_.group() + h);
      for (int n = 0; n < work.blocks; ++n) store_keys(work, work.block[n], b, hk);
    }
  bias_.write(w.bias, work.key_group, work.query_group, first_batch, first_head * p_.group(), work.block[0].key,
              work.block[0].keys);
  work.blocks = 0;
}

template <class T, class E>
void AttentionBackward<T, E>::run_head(Work& work, Scratch& w, Index b, Index h) const {
  const Site<T, E> site(p_, b, h);
  const Block& last = work.block[work.blocks - 1];
  const Index start = work.block[0].key, end = last.key + last.keys;
  const bool neighbours = last.key - start == (work.blocks - 1) * kTileKeys && !bias_.on();
  const auto [first_panel, last_panel] = plan_.panels_of(work.query_group);
  for (Index n = first_panel; n < last_panel; ++n) {
    Panels panel(p_, n);
    panel.q_t = q_panel(shared_.rows, row_of(b, h, n));
    if (neighbours && is_hidden(site, panel, start, end - start)) continue;
    for (int x = 0; x < work.blocks; ++x) run_tile(work, work.block[x], w, site, panel, n);
    add_pending_to_queries(work, w, site, n);
  }
  for (int x = 0; x < work.blocks; ++x) add_pending_to_keys(work.block[x], site);
}

// The gradients of one block's keys, to their place or to the partial sums.
template <class T, class E>
void AttentionBackward<T, E>::store_keys(const Work& work, const Block& block, Index b, Index hk) const {
  const auto save = [&](const T* from, T* sums, const Matrices<E>& to, Index width, T factor, const RowTurn<T>& turn) {
    if (!from) return;
    const Index first = ((work.query_group * p_.batch + b) * p_.key_heads + hk) * p_.keys + block.key;
    for (int k = 0; k < block.keys; ++k) {
      E* line = sums ? nullptr : to.at(b, hk) + (block.key + k) * to.row_stride;
      each_piece<T>(width, [&](Index c, int n) {
        const Vec<T> x = splat(factor) * load(from + k * padded(width) + c);
        sums ? store(sums + (first + k) * padded(width) + c, x) : write_elements(line + c, x, n);
      });
      if (turn.defined() && line) turn(line, line, 1, width, b, block.key + k);
    }
  };
  save(block.dk, sums_.dk, result_.grad_key, p_.width, p_.scale, result_.turn_key);
  save(block.dv, sums_.dv, result_.grad_value, p_.value_width, T(1), {});
}

// Third pass.
template <class T, class E>
void AttentionBackward<T, E>::finish(Index task) const {
  if (task < prepare_tasks()) return finish_panel(task);
  if (task < finish_tasks() - 1) return finish_keys(task - prepare_tasks());
  finish_shared();
}

template <class T, class E>
void AttentionBackward<T, E>::finish_shared() const {
  if (sums_.bias) bias_.finish();
  if (sums_.sinks) finish_sinks();
}

template <class T, class E>
void AttentionBackward<T, E>::run_owner(Index task, Arena& arena) const {
  Pieces rows(&arena);
  const AttentionBackward local = of_owner(task, rows);
  const BackwardHeads& heads = local.heads_;
  char* const rest = arena.mark();
  const auto each_panel = [&](auto&& f) {
    for (Index n = 0; n < heads.count(); ++n)
      for (Index panel = 0; panel < plan_.panels; ++panel)
        f(head(heads.first_batch + n / heads.heads, heads.first + n % heads.heads) * plan_.panels + panel);
  };
  each_panel([&](Index panel) { arena.reset(rest), local.prepare(panel, arena); });
  arena.reset(rest), local.run(task, arena);
  each_panel([&](Index panel) { local.finish_panel(panel); });
}

template <class T, class E>
void AttentionBackward<T, E>::finish_panel(Index task) const {
  const Index number = task % plan_.panels, bh = task / plan_.panels, b = bh / p_.heads, h = bh % p_.heads;
  const Index first = number * kWidth, row = row_of(b, h, number);
  const Index count = std::min<Index>(kWidth, p_.queries - first);
  begin_sums(0, row);  // where the panel saw nothing
  if (shared_.dq_t) {
    T* sum = dq_panel(0, row);
    for (Index g = 1; g < plan_.key_groups; ++g)
      for (Index n = 0; summed(g, row) && n < kWidth * p_.width; n += kStep)
        store(sum + n, load(sum + n) + load(dq_panel(g, row) + n));
    T factors[kWidth];
    std::fill_n(factors, kWidth, p_.scale);
    const Matrices<E>& grad = result_.grad_query;
    E* rows = grad.at(b, h) + first * grad.row_stride;
    lanes_to_rows(rows, grad.row_stride, sum, kWidth, factors, int(count), p_.width);
    if (result_.turn_query.defined())
      for (Index q = 0; q < count; ++q) {
        E* row = rows + q * grad.row_stride;
        result_.turn_query(row, row, 1, p_.width, b, first + q);
      }
  }
  if (shared_.row_sums)
    for (Index q = 0; q < count; ++q) {
      T sum = 0;
      for (Index g = 0; g < plan_.key_groups; ++g)
        if (summed(g, row)) sum -= row_sums(g, row)[q];
      result_.negative_rows[bh * p_.queries + first + q] = sum;
    }
}

template <class T, class E>
void AttentionBackward<T, E>::finish_keys(Index task) const {
  const Index block = task % plan_.key_blocks, bhk = task / plan_.key_blocks,
              keys_all = p_.batch * p_.key_heads * p_.keys;
  const Index end = std::min<Index>((block + 1) * kTileKeys, p_.keys);
  const auto add = [&](const T* sums, const Matrices<E>& to, Index width, const RowTurn<T>& turn) {
    for (Index k = block * kTileKeys; sums && k < end; ++k) {
      E* line = to.at(bhk / p_.key_heads, bhk % p_.key_heads) + k * to.row_stride;
      each_piece<T>(width, [&](Index c, int n) {
        Vec<T> sum{};
        for (Index g = 0; g < plan_.query_groups(); ++g)
          sum += load(sums + (g * keys_all + bhk * p_.keys + k) * padded(width) + c);
        write_elements(line + c, sum, n);
      });
      if (turn.defined()) turn(line, line, 1, width, bhk / p_.key_heads, k);
    }
  };
  add(sums_.dk, result_.grad_key, p_.width, result_.turn_key);
  add(sums_.dv, result_.grad_value, p_.value_width, {});
}

template <class T, class E>
void AttentionBackward<T, E>::finish_sinks() const {
  for (Index h = 0; h < p_.heads; ++h) {
    T sum = 0;
    for (Index b = 0; b < p_.batch; ++b)
      for (Index n = 0; n < plan_.panels; ++n) sum += sums_.sinks[head(b, h) * plan_.panels + n];
    result_.grad_sinks[h] = sum;
  }
}

}  // namespace attention_ops
