// The three passes of AttentionBackward: prepare rows, accumulate tiles, add partial sums.
#pragma once
#include "kernels/cpu/attention_backward.h"

namespace attention_ops {

template <class T, class E>
void AttentionBackward<T, E>::pad_rows(E* to, const E* from, Index stride, int rows, Index width) const {
  if constexpr (kPaired<E>) return interleave_rows(to, padded(width), from, stride, rows, kWidth, width);
  for (int r = 0; r < rows; ++r, to += padded(width)) {
    std::copy_n(from + r * stride, width, to);
    std::fill(to + width, to + padded(width), E{});
  }
}

// First pass, one panel of one head: transposed rows, -delta and lse, the sink's share.
template <class T, class E>
void AttentionBackward<T, E>::prepare(Index task, Arena& arena) const {
  const Index number = task % plan_.panels, bh = task / plan_.panels, b = bh / p_.heads, h = bh % p_.heads;
  [[maybe_unused]] const ProductUnit<E> unit;
  Panels panel(p_, number);
  const Index row = row_of(b, h, number), stride = p_.q.row_stride, do_stride = in_.grad_out.row_stride;
  const E* q = p_.q.at(b, h) + panel.first * stride;
  rows_to_panel(q_panel(row), kWidth, q, stride, panel.count, p_.width, p_.query_factor());
  if (shared_.q_rows) pad_rows(shared_.q_rows + row * padded(p_.width), q, stride, panel.count, p_.width);
  bool finite = all_finite<T>(q, stride, panel.count, p_.width);
  const E* grad_out = in_.grad_out.data ? in_.grad_out.at(b, h) + panel.first * do_stride : nullptr;
  if (grad_out) {
    const Index width = p_.value_width;
    rows_to_panel(do_panel(row), kWidth, grad_out, do_stride, panel.count, width, T(1));
    if (shared_.do_rows) pad_rows(shared_.do_rows + row * padded(width), grad_out, do_stride, panel.count, width);
    finite = finite && all_finite<T>(grad_out, do_stride, panel.count, width);
  }
  shared_.finite[task] = finite;
  ScoreTile<T> tile;
  Pieces pieces(&arena);
  tile.take(pieces, p_, kWidth, /*backward=*/false);
  panel.q_t = q_panel(row);
  const Site<T, E> site(p_, b, h);
  const RowNorm<T> norm{shared_.norm.base + row, shared_.norm.log2_l + row};
  find_row_norm(norm, in_.lse + bh * p_.queries + panel.first, tile, site, panel);
  T sink_sum = 0;
  for (int lane = 0; lane < kWidth; ++lane) {
    const Index i = panel.first + lane, n = bh * p_.queries + i;
    T delta = 0;
    if (lane < panel.count) {
      const E* out = grad_out ? in_.out.at(b, h) + i * in_.out.row_stride : nullptr;
      if (grad_out) delta = dot<T>(out, grad_out + lane * do_stride, p_.value_width);
      if (in_.grad_lse) delta -= in_.grad_lse[n];
      if (shared_.sink_sums && in_.lse[n] != -kInfinity<T>)
        sink_sum -= std::exp2(site.sink() - norm.base[lane] - norm.log2_l[lane]) * delta;
    }
    shared_.delta[row + lane] = delta;
  }
  if (shared_.sink_sums) shared_.sink_sums[task] = sink_sum;
  if (task == 0) bias_.clear_sums();
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
  clear_rows(work);
  for (Index number = 0; number < plan_.key_blocks; ++number) {
    if (plan_.group_of_block(number) != work.key_group) continue;
    Block& block = work.block[work.blocks];
    block.key = number * kTileKeys;
    block.keys = int(std::min<Index>(kTileKeys, p_.keys - block.key));
    block.dk = w.dk ? w.dk + work.blocks * kTileKeys * padded(p_.width) : nullptr;
    block.dv = w.dv ? w.dv + work.blocks * kTileKeys * padded(p_.value_width) : nullptr;
    if (++work.blocks == blocks_at_a_time()) run_blocks(work, w);
  }
  run_blocks(work, w);
  visited_tiles.fetch_add(w.visited, std::memory_order_relaxed);
}

// The rows' partial sums of one task.
template <class T, class E>
void AttentionBackward<T, E>::clear_rows(const Work& work) const {
  const auto [first_batch, last_batch] = plan_.batches_of(work.owner, p_);
  const auto [first_head, last_head] = plan_.key_heads_of(work.owner, p_);
  const Index rows = (plan_.first_panel(work.query_group + 1) - plan_.first_panel(work.query_group)) * kWidth;
  for (Index b = first_batch; b < last_batch; ++b)
    for (Index h = first_head * p_.group(); h < last_head * p_.group(); ++h) {
      const Index row = row_of(b, h, plan_.first_panel(work.query_group));
      if (shared_.dq_t) std::fill_n(dq_panel(work.key_group, row), rows * dq_width(), T(0));
      if (shared_.row_sums) std::fill_n(row_sums(work.key_group, row), rows, T(0));
    }
}

// The gathered key blocks, over all batches and heads of their owner.
template <class T, class E>
void AttentionBackward<T, E>::run_blocks(Work& work, Scratch& w) const {
  const auto [first_batch, last_batch] = plan_.batches_of(work.owner, p_);
  const auto [first_head, last_head] = plan_.key_heads_of(work.owner, p_);
  bias_.start(w.bias);
  for (Index b = first_batch; b < last_batch; ++b)
    for (Index hk = first_head; hk < last_head; ++hk) {
      for (Block* x = work.block; x < work.block + work.blocks; ++x) {
        if (x->dk) std::fill_n(x->dk, round_up(x->keys, kRowUnit<E>) * padded(p_.width), T(0));
        if (x->dv) std::fill_n(x->dv, round_up(x->keys, kRowUnit<E>) * padded(p_.value_width), T(0));
        x->finite = all_finite<T>(p_.k.at(b, hk) + x->key * p_.k.row_stride, p_.k.row_stride, x->keys, p_.width);
      }
      for (Index h = hk * p_.group(); h < (hk + 1) * p_.group(); ++h) run_head(work, w, b, h);
      for (int n = 0; n < work.blocks; ++n) store_keys(work, work.block[n], b, hk);
    }
  if (bias_.on() && work.blocks)
    bias_.write(w.bias, work.key_group, work.query_group, first_batch, first_head * p_.group(), work.block[0].key,
                work.block[0].keys);
  work.blocks = 0;
}

template <class T, class E>
void AttentionBackward<T, E>::run_head(const Work& work, Scratch& w, Index b, Index h) const {
  const Site<T, E> site(p_, b, h);
  for (Index n = plan_.first_panel(work.query_group); n < plan_.first_panel(work.query_group + 1); ++n) {
    Panels panel(p_, n);
    panel.q_t = q_panel(row_of(b, h, n));
    for (int x = 0; x < work.blocks; ++x) run_tile(work, work.block[x], w, site, panel, n);
  }
}

template <class T, class E>
PaddedRows<E> AttentionBackward<T, E>::rows_of(const E* padded_rows, const Matrices<const E>& natural, Index b, Index h,
                                               Index panel, Index width) const {
  constexpr int kTogether = kPaired<E> ? 2 : 1;
  if (padded_rows) return {padded_rows + row_of(b, h, panel) * padded(width), kTogether * padded(width)};
  return {natural.at(b, h) + panel * kWidth * natural.row_stride, natural.row_stride};
}

template <class T, class E>
void AttentionBackward<T, E>::run_tile(const Work& work, const Block& block, Scratch& w, const Site<T, E>& site,
                                       const Panels& panel, Index number) const {
  find_cover(w.tile, site, panel, block.key, block.keys);
  if (w.tile.cover == Cover::none) return;
  ++w.visited;
  const Index row = row_of(site.b, site.h, number);
  compute_weights(block, w, site, panel, row);
  const PaddedRows<E> v{site.v + block.key * p_.v.row_stride, p_.v.row_stride};
  source_.fill(w.dp, {site.b, site.h, panel.first, block.key, panel.count, block.keys, v,
                      shared_.do_t ? do_panel(row) : nullptr, w.log2_p, w.tile});
  const T kept = T(p_.dropout.scale());
  if (w.keep) {
    fill_kept(w.keep, site, panel, block.key, block.keys);
    apply_kept<T, kWidth>(w.dp, w.tile, w.keep, kept);
  }
  score_gradient(w, row, panel.count);
  if (bias_.on()) bias_.add(w.bias, w.tile, w.dp, site.h, number);
  if (shared_.row_sums) {
    T* sums = row_sums(work.key_group, row);
    each_vector<T, kWidth>(w.tile, [&](Index n, int lane) { store(sums + lane, load(sums + lane) + load(w.dp + n)); });
  }
  if (w.tile.slope)
    each_vector<T, kWidth>(w.tile, [&](Index n, int) { store(w.dp + n, load(w.dp + n) * load(w.tile.slope + n)); });
  if (w.keep) apply_kept<T, kWidth>(w.tile.s, w.tile, w.keep, kept);
  add_tile(work, block, w, site, panel, number);
}

// p = exp(s - lse), in place of s
template <class T, class E>
void AttentionBackward<T, E>::compute_weights(const Block& block, Scratch& w, const Site<T, E>& site,
                                              const Panels& panel, Index row) const {
  const T *base = shared_.norm.base + row, *log2_l = shared_.norm.log2_l + row;
  each_span(w.tile, [&](auto vectors, const Span& span) {
    const auto exponent = [&](Vec<T> s, Index n, int v) {
      const int lane = (span.vector + v) * kStep;
      const Vec<T> x = s - load(base + lane) - load(log2_l + lane);
      if (w.log2_p) store(w.log2_p + n, x);
      return x;
    };
    span_weights<T, vectors>(w.tile, site, panel, block.key, span, exponent, [](Vec<T>, int) {});
  });
}

// ds = p (dp - delta), in place of dp; p and ds become 0 where masked or past the last row.
template <class T, class E>
void AttentionBackward<T, E>::score_gradient(const Scratch& w, Index row, int rows) const {
  alignas(kVectorBytes) LaneInt<T> real[kWidth];
  for (int q = 0; q < kWidth; ++q) real[q] = q < rows ? -1 : 0;
  const bool all = w.tile.cover == Cover::all, ragged = rows % kStep != 0;
  each_vector<T, kWidth>(w.tile, [&](Index n, int lane) {
    const Vec<T> p = load(w.tile.s + n), ds = p * (load(w.dp + n) - load(shared_.delta + row + lane));
    if (all && !ragged) return store(w.dp + n, ds);
    const Ints<T> keep = load_lanes<T>(real + lane) & (all ? ~Ints<T>{} : load_lanes<T>(w.tile.visible + n));
    store(w.dp + n, keep ? ds : Vec<T>{});
    store(w.tile.s + n, keep ? p : Vec<T>{});
  });
}

// What the tile gives to the gradients of key, value and query.
template <class T, class E>
void AttentionBackward<T, E>::add_tile(const Work& work, const Block& block, const Scratch& w, const Site<T, E>& site,
                                       const Panels& panel, Index number) const {
  const Index row = row_of(site.b, site.h, number);
  // Masked places may hold anything: where a row of the tile is not finite, only visible pairs are multiplied.
  const bool finite = block.finite && shared_.finite[row / kWidth];
  if (!finite && (kPaired<E> || w.tile.cover != Cover::all)) {
    add_visible(work, block, w, site, panel, row);
    if (!kPaired<E>) return;
  }
  const auto grad_rows = rows_of(shared_.do_rows, in_.grad_out, site.b, site.h, number, p_.value_width);
  const auto query_rows = rows_of(shared_.q_rows, p_.q, site.b, site.h, number, p_.width);
  each_span(w.tile, [&](auto vectors, const Span& span) {
    if (block.dv) add_to_keys<vectors>(block.dv, w, w.tile.s, grad_rows, padded(p_.value_width), span, panel.count);
    if (block.dk) add_to_keys<vectors>(block.dk, w, w.dp, query_rows, padded(p_.width), span, panel.count);
    if (shared_.dq_t) add_to_queries<vectors>(dq_panel(work.key_group, row), w, site, block.key, span);
  });
}

// out[k][:] += sum_q a[k][q] b[q][:]
template <class T, class E>
template <int NV>
void AttentionBackward<T, E>::add_to_keys(T* out, const Scratch& w, const T* a, const PaddedRows<E>& b, Index width,
                                          const Span& span, int rows) const {
  const int first = span.vector * kStep, count = std::min(NV * kStep, rows - first);
  out += span.key * width;
  if constexpr (kPaired<E>) {
    const int start = first / kPairDepth * kPairDepth;
    round_along(w.rounded, a, kWidth, span.key, span.key + span.keys, first, first + NV * kStep);
    multiply_pairs<true>(out, width, {w.rounded + span.key * kWidth + start, kWidth},
                         {b.data + start * width, b.stride}, span.keys, width / kStep, first + count - start);
  } else {
    const T* from = b.data + first * b.stride;
    a += Index(span.key) * kWidth + first;
    each_row_tile<kRegisterVectors>(width / kStep, [&](auto vectors, Index column) {
      each_row_tile<kTileRows<vectors>>(span.keys, [&](auto tile_rows, Index k) {
        Accumulators<T, tile_rows, vectors> acc{};
        multiply_rows<T, tile_rows, vectors>(acc, a + k * kWidth, kWidth, from + column * kStep, b.stride, count);
        each<T, tile_rows, vectors>(acc, [&](Vec<T>& x, int r, int n) {
          T* to = out + (k + r) * width + (column + n) * kStep;
          store(to, load(to) + x);
        });
      });
    });
  }
}

// dq[d][:] += sum_k k[k][d] ds[k][:]
template <class T, class E>
template <int NV>
void AttentionBackward<T, E>::add_to_queries(T* dq, const Scratch& w, const Site<T, E>& site, Index key,
                                             const Span& span) const {
  const Index lane = span.vector * kStep;
  dq += lane;
  if constexpr (kPaired<E>) {
    const int first = span.key / kPairDepth * kPairDepth;
    const PaddedRows<E> k = columns_.at(site.b, site.h / p_.group(), key);
    round_across(w.rounded + 2 * lane, w.dp + lane, kWidth, span.key, span.key + span.keys, NV);
    multiply_pairs<true>(dq, kWidth, {k.data + first, k.stride}, {w.rounded + first * kWidth + 2 * lane, 2 * kWidth},
                         p_.width, NV, span.key + span.keys - first);
  } else {
    const Index stride = p_.k.row_stride;
    const T *k = site.k + (key + span.key) * stride, *ds = w.dp + span.key * kWidth + lane;
    each_row_tile<kTileRows<NV>>(p_.width, [&](auto rows, Index d) {
      Accumulators<T, rows, NV> acc{};
      multiply_columns<T, rows, NV>(acc, k + d, stride, ds, kWidth, span.keys);
      each<T, rows, NV>(acc, [&](Vec<T>& x, int r, int n) {
        T* to = dq + (d + r) * kWidth + n * kStep;
        store(to, load(to) + x);
      });
    });
  }
}

// add_tile without touching what masked places hold; of pairs only what products lack.
template <class T, class E>
void AttentionBackward<T, E>::add_visible(const Work& work, const Block& block, const Scratch& w,
                                          const Site<T, E>& site, const Panels& panel, Index row) const {
  const Index b = site.b, h = site.h, first = panel.first;
  const LaneInt<T>* visible = w.tile.cover == Cover::some ? w.tile.visible : nullptr;
  const PaddedRows<E> k{site.k + block.key * p_.k.row_stride, p_.k.row_stride};
  for (int n = 0; n < w.tile.number_of_spans; ++n) {
    const Span& span = w.tile.spans[n];
    if (block.dv)
      add_visible_to_keys(block.dv, w.tile.s,
                          {in_.grad_out.at(b, h) + first * in_.grad_out.row_stride, in_.grad_out.row_stride},
                          p_.value_width, span, panel.count, visible);
    if (block.dk)
      add_visible_to_keys(block.dk, w.dp, {p_.q.at(b, h) + first * p_.q.row_stride, p_.q.row_stride}, p_.width, span,
                          panel.count, visible);
    if (shared_.dq_t) add_visible_to_queries(dq_panel(work.key_group, row), k, w.dp, span, visible);
  }
}

template <class T, class E>
void AttentionBackward<T, E>::add_visible_to_keys(T* out, const T* a, const PaddedRows<E>& b, Index width,
                                                  const Span& span, int rows, const LaneInt<T>* visible) const {
  const int first = span.vector * kStep, last = std::min(first + span.vectors * kStep, rows);
  for (int k = span.key; k < span.key + span.keys; ++k)
    each_piece<T>(width, [&](Index c, int n) {
      Vec<T> acc{};
      for (int q = first; q < last; ++q)
        if (!visible || visible[k * kWidth + q])
          acc = fma(splat(a[k * kWidth + q]), left_out<T, E>(read_elements<T>(b.data + q * b.stride + c, 1, n)), acc);
      T* to = out + k * padded(width) + c;
      store(to, load(to) + acc);
    });
}

template <class T, class E>
void AttentionBackward<T, E>::add_visible_to_queries(T* dq, const PaddedRows<E>& k, const T* ds, const Span& span,
                                                     const LaneInt<T>* visible) const {
  for (Index d = 0; d < p_.width; ++d)
    for (int q = span.vector * kStep; q < (span.vector + span.vectors) * kStep; q += kStep) {
      Vec<T> acc{};
      for (int n = span.key; n < span.key + span.keys; ++n) {
        const Vec<T> x = left_out<T, E>(splat(T(k.data[n * k.stride + d]))),
                     sum = fma(x, load(ds + n * kWidth + q), acc);
        acc = (visible ? load_lanes<T>(visible + n * kWidth + q) : ~Ints<T>{}) ? sum : acc;
      }
      store(dq + d * kWidth + q, load(dq + d * kWidth + q) + acc);
    }
}

// The gradients of one block's keys, to their place or to the partial sums.
template <class T, class E>
void AttentionBackward<T, E>::store_keys(const Work& work, const Block& block, Index b, Index hk) const {
  const auto save = [&](const T* from, T* sums, const Matrices<E>& to, Index width, T factor) {
    if (!from) return;
    const Index first = ((work.query_group * p_.batch + b) * p_.key_heads + hk) * p_.keys + block.key;
    for (int k = 0; k < block.keys; ++k) {
      E* line = sums ? nullptr : to.at(b, hk) + (block.key + k) * to.row_stride;
      each_piece<T>(width, [&](Index c, int n) {
        const Vec<T> x = splat(factor) * load(from + k * padded(width) + c);
        sums ? store(sums + (first + k) * padded(width) + c, x) : write_elements(line + c, x, n);
      });
    }
  };
  save(block.dk, shared_.dk, result_.grad_key, p_.width, p_.scale);
  save(block.dv, shared_.dv, result_.grad_value, p_.value_width, T(1));
}

// Third pass.
template <class T, class E>
void AttentionBackward<T, E>::finish(Index task) const {
  if (task < prepare_tasks()) return finish_panel(task);
  if (task < finish_tasks() - 1) return finish_keys(task - prepare_tasks());
  if (shared_.bias_sums) bias_.finish();
  if (shared_.sink_sums) finish_sinks();
}

template <class T, class E>
void AttentionBackward<T, E>::finish_panel(Index task) const {
  const Index number = task % plan_.panels, bh = task / plan_.panels, b = bh / p_.heads, h = bh % p_.heads;
  const Index first = number * kWidth, row = row_of(b, h, number);
  const Index count = std::min<Index>(kWidth, p_.queries - first);
  if (shared_.dq_t) {
    T* sum = dq_panel(0, row);
    for (Index g = 1; g < plan_.key_groups; ++g)
      for (Index n = 0; n < kWidth * p_.width; n += kStep) store(sum + n, load(sum + n) + load(dq_panel(g, row) + n));
    T factors[kWidth];
    std::fill_n(factors, kWidth, p_.scale);
    const Matrices<E>& grad = result_.grad_query;
    lanes_to_rows(grad.at(b, h) + first * grad.row_stride, grad.row_stride, sum, kWidth, factors, int(count), p_.width);
  }
  if (shared_.row_sums)
    for (Index q = 0; q < count; ++q) {
      T sum = 0;
      for (Index g = 0; g < plan_.key_groups; ++g) sum -= row_sums(g, row)[q];
      result_.negative_rows[bh * p_.queries + first + q] = sum;
    }
}

template <class T, class E>
void AttentionBackward<T, E>::finish_keys(Index task) const {
  const Index block = task % plan_.key_blocks, bhk = task / plan_.key_blocks,
              keys_all = p_.batch * p_.key_heads * p_.keys;
  const Index end = std::min<Index>((block + 1) * kTileKeys, p_.keys);
  const auto add = [&](const T* sums, const Matrices<E>& to, Index width) {
    for (Index k = block * kTileKeys; sums && k < end; ++k) {
      E* line = to.at(bhk / p_.key_heads, bhk % p_.key_heads) + k * to.row_stride;
      for (Index c = 0; c < width; ++c) {
        T sum = 0;
        for (Index g = 0; g < plan_.query_groups; ++g)
          sum += sums[(g * keys_all + bhk * p_.keys + k) * padded(width) + c];
        line[c] = convert<E>(sum);
      }
    }
  };
  add(shared_.dk, result_.grad_key, p_.width);
  add(shared_.dv, result_.grad_value, p_.value_width);
}

template <class T, class E>
void AttentionBackward<T, E>::finish_sinks() const {
  for (Index h = 0; h < p_.heads; ++h) {
    T sum = 0;
    for (Index b = 0; b < p_.batch; ++b)
      for (Index n = 0; n < plan_.panels; ++n) sum += shared_.sink_sums[head(b, h) * plan_.panels + n];
    result_.grad_sinks[h] = sum;
  }
}

}  // namespace attention_ops
