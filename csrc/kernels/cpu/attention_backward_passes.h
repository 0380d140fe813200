// The three passes of AttentionBackward: prepare rows, accumulate tiles, add partial sums.
#pragma once
#include "kernels/cpu/attention_backward.h"

namespace attention_ops {

template <class T>
void AttentionBackward<T>::pad_rows(T* to, const T* from, Index stride, int rows, Index width) const {
  for (int r = 0; r < rows; ++r, to += padded(width)) {
    std::copy_n(from + r * stride, width, to);
    std::fill(to + width, to + padded(width), T(0));
  }
}

// First pass, one panel of one head: transposed rows, -delta and lse, the sink's share.
template <class T>
void AttentionBackward<T>::prepare(Index task, Arena& arena) const {
  const Index number = task % plan_.panels, bh = task / plan_.panels, b = bh / p_.heads, h = bh % p_.heads;
  Panels panel(p_, number);
  const Index row = row_of(b, h, number), stride = p_.q.row_stride, do_stride = in_.grad_out.row_stride;
  const T* q = p_.q.at(b, h) + panel.first * stride;
  rows_to_lanes(shared_.q_t + row * p_.width, kWidth, q, stride, panel.count, p_.width, p_.query_factor());
  if (shared_.q_rows) pad_rows(shared_.q_rows + row * padded(p_.width), q, stride, panel.count, p_.width);
  bool finite = all_finite(q, stride, panel.count, p_.width);
  const T* grad_out = in_.grad_out.data ? in_.grad_out.at(b, h) + panel.first * do_stride : nullptr;
  if (grad_out) {
    const Index width = p_.value_width;
    rows_to_lanes(shared_.do_t + row * width, kWidth, grad_out, do_stride, panel.count, width, T(1));
    if (shared_.do_rows) pad_rows(shared_.do_rows + row * padded(width), grad_out, do_stride, panel.count, width);
    finite = finite && all_finite(grad_out, do_stride, panel.count, width);
  }
  shared_.finite[task] = finite;
  ScoreTile<T> tile;
  Pieces pieces(&arena);
  tile.take(pieces, p_, kWidth, /*backward=*/false);
  panel.q_t = shared_.q_t + row * p_.width;
  const Site<T> site(p_, b, h);
  const RowNorm<T> norm{shared_.norm.base + row, shared_.norm.log2_l + row};
  find_row_norm(norm, in_.lse + bh * p_.queries + panel.first, tile, site, panel);
  T sink_sum = 0;
  for (int lane = 0; lane < kWidth; ++lane) {
    const Index i = panel.first + lane, n = bh * p_.queries + i;
    T delta = 0;
    if (lane < panel.count) {
      const T* out = grad_out ? in_.out.at(b, h) + i * in_.out.row_stride : nullptr;
      if (grad_out) delta = dot(out, grad_out + lane * do_stride, p_.value_width);
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
template <class T>
void AttentionBackward<T>::run(Index task, Arena& arena) const {
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
}

// The rows' partial sums of one task.
template <class T>
void AttentionBackward<T>::clear_rows(const Work& work) const {
  const auto [first_batch, last_batch] = plan_.batches_of(work.owner, p_);
  const auto [first_head, last_head] = plan_.key_heads_of(work.owner, p_);
  const Index rows = (plan_.first_panel(work.query_group + 1) - plan_.first_panel(work.query_group)) * kWidth;
  for (Index b = first_batch; b < last_batch; ++b)
    for (Index h = first_head * p_.group(); h < last_head * p_.group(); ++h) {
      const Index row = row_of(b, h, plan_.first_panel(work.query_group));
      if (shared_.dq_t) std::fill_n(dq_panel(work.key_group, row), rows * p_.width, T(0));
      if (shared_.row_sums) std::fill_n(row_sums(work.key_group, row), rows, T(0));
    }
}

// The gathered key blocks, over all batches and heads of their owner.
template <class T>
void AttentionBackward<T>::run_blocks(Work& work, Scratch& w) const {
  const auto [first_batch, last_batch] = plan_.batches_of(work.owner, p_);
  const auto [first_head, last_head] = plan_.key_heads_of(work.owner, p_);
  bias_.start(w.bias);
  for (Index b = first_batch; b < last_batch; ++b)
    for (Index hk = first_head; hk < last_head; ++hk) {
      for (Block* x = work.block; x < work.block + work.blocks; ++x) {
        if (x->dk) std::fill_n(x->dk, x->keys * padded(p_.width), T(0));
        if (x->dv) std::fill_n(x->dv, x->keys * padded(p_.value_width), T(0));
        x->finite = all_finite(p_.k.at(b, hk) + x->key * p_.k.row_stride, p_.k.row_stride, x->keys, p_.width);
      }
      for (Index h = hk * p_.group(); h < (hk + 1) * p_.group(); ++h) run_head(work, w, b, h);
      for (int n = 0; n < work.blocks; ++n) store_keys(work, work.block[n], b, hk);
    }
  if (bias_.on() && work.blocks)
    bias_.write(w.bias, work.key_group, work.query_group, first_batch, first_head * p_.group(), work.block[0].key,
                work.block[0].keys);
  work.blocks = 0;
}

template <class T>
void AttentionBackward<T>::run_head(const Work& work, Scratch& w, Index b, Index h) const {
  const Site<T> site(p_, b, h);
  for (Index n = plan_.first_panel(work.query_group); n < plan_.first_panel(work.query_group + 1); ++n) {
    Panels panel(p_, n);
    panel.q_t = shared_.q_t + row_of(b, h, n) * p_.width;
    for (int x = 0; x < work.blocks; ++x) run_tile(work, work.block[x], w, site, panel, n);
  }
}

template <class T>
PaddedRows<T> AttentionBackward<T>::rows_of(const T* padded_rows, const Matrices<const T>& natural, Index b, Index h,
                                            Index panel, Index width) const {
  if (padded_rows) return {padded_rows + row_of(b, h, panel) * padded(width), padded(width)};
  return {natural.at(b, h) + panel * kWidth * natural.row_stride, natural.row_stride};
}

template <class T>
void AttentionBackward<T>::run_tile(const Work& work, const Block& block, Scratch& w, const Site<T>& site,
                                    const Panels& panel, Index number) const {
  find_cover(w.tile, site, panel, block.key, block.keys);
  if (w.tile.cover == Cover::none) return;
  visited_tiles.fetch_add(1, std::memory_order_relaxed);
  const Index row = row_of(site.b, site.h, number);
  compute_weights(block, w, site, panel, row);
  const T* v = site.v + block.key * p_.v.row_stride;
  source_.fill(w.dp, {site.b, site.h, panel.first, block.key, panel.count, block.keys, v, p_.v.row_stride,
                      shared_.do_t ? shared_.do_t + row * p_.value_width : nullptr, w.log2_p, w.tile});
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
template <class T>
void AttentionBackward<T>::compute_weights(const Block& block, Scratch& w, const Site<T>& site, const Panels& panel,
                                           Index row) const {
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
template <class T>
void AttentionBackward<T>::score_gradient(const Scratch& w, Index row, int rows) const {
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
template <class T>
void AttentionBackward<T>::add_tile(const Work& work, const Block& block, const Scratch& w, const Site<T>& site,
                                    const Panels& panel, Index number) const {
  const Index row = row_of(site.b, site.h, number);
  // Masked places may hold anything: where a row of the tile is not finite, only visible pairs are multiplied.
  const bool clean = w.tile.cover == Cover::all || (block.finite && shared_.finite[row / kWidth]);
  const LaneInt<T>* visible = clean ? nullptr : w.tile.visible;
  const auto grad_rows = rows_of(shared_.do_rows, in_.grad_out, site.b, site.h, number, p_.value_width);
  const auto query_rows = rows_of(shared_.q_rows, p_.q, site.b, site.h, number, p_.width);
  each_span(w.tile, [&](auto vectors, const Span& span) {
    if (block.dv)
      add_to_keys<vectors>(block.dv, w.tile.s, grad_rows, padded(p_.value_width), span, panel.count, visible);
    if (block.dk) add_to_keys<vectors>(block.dk, w.dp, query_rows, padded(p_.width), span, panel.count, visible);
    if (shared_.dq_t)
      add_to_queries<vectors>(dq_panel(work.key_group, row), site.k + block.key * p_.k.row_stride, w.dp, span, visible);
  });
}

// out[k][:] += sum_q a[k][q] b[q][:]
template <class T>
template <int NV>
void AttentionBackward<T>::add_to_keys(T* out, const T* a, const PaddedRows<T>& b, Index width, const Span& span,
                                       int rows, const LaneInt<T>* visible) const {
  const int first = span.vector * kStep, count = std::min(NV * kStep, rows - first);
  const T* from = b.data + first * b.stride;
  a += Index(span.key) * kWidth + first, out += span.key * width;
  if (visible) {
    visible += Index(span.key) * kWidth + first;
    for (int k = 0; k < span.keys; ++k)
      for (Index c = 0; c < width; c += kStep) {
        Vec<T> acc{};
        for (int q = 0; q < count; ++q)
          if (visible[k * kWidth + q]) acc = fma(splat(a[k * kWidth + q]), load(from + q * b.stride + c), acc);
        store(out + k * width + c, load(out + k * width + c) + acc);
      }
    return;
  }
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

// dq[d][:] += sum_k k[k][d] ds[k][:]
template <class T>
template <int NV>
void AttentionBackward<T>::add_to_queries(T* dq, const T* k, const T* ds, const Span& span,
                                          const LaneInt<T>* visible) const {
  const Index stride = p_.k.row_stride, first = Index(span.key) * kWidth + span.vector * kStep;
  k += span.key * stride, ds += first, dq += span.vector * kStep;
  if (visible) {
    for (Index d = 0; d < p_.width; ++d)
      for (int q = 0; q < NV * kStep; q += kStep) {
        Vec<T> acc{};
        for (int n = 0; n < span.keys; ++n) {
          const Vec<T> sum = fma(splat(k[n * stride + d]), load(ds + n * kWidth + q), acc);
          acc = load_lanes<T>(visible + first + n * kWidth + q) ? sum : acc;
        }
        store(dq + d * kWidth + q, load(dq + d * kWidth + q) + acc);
      }
    return;
  }
  each_row_tile<kTileRows<NV>>(p_.width, [&](auto rows, Index d) {
    Accumulators<T, rows, NV> acc{};
    multiply_columns<T, rows, NV>(acc, k + d, stride, ds, kWidth, span.keys);
    each<T, rows, NV>(acc, [&](Vec<T>& x, int r, int n) {
      T* to = dq + (d + r) * kWidth + n * kStep;
      store(to, load(to) + x);
    });
  });
}

// The gradients of one block's keys, to their place or to the partial sums.
template <class T>
void AttentionBackward<T>::store_keys(const Work& work, const Block& block, Index b, Index hk) const {
  const auto save = [&](const T* from, T* sums, const Matrices<T>& to, Index width, T factor) {
    if (!from) return;
    const Index first = ((work.query_group * p_.batch + b) * p_.key_heads + hk) * p_.keys + block.key;
    for (int k = 0; k < block.keys; ++k) {
      T* line = sums ? sums + (first + k) * padded(width) : to.at(b, hk) + (block.key + k) * to.row_stride;
      for (Index c = 0; c < width; ++c) line[c] = factor * from[k * padded(width) + c];
    }
  };
  save(block.dk, shared_.dk, result_.grad_key, p_.width, p_.scale);
  save(block.dv, shared_.dv, result_.grad_value, p_.value_width, T(1));
}

// Third pass.
template <class T>
void AttentionBackward<T>::finish(Index task) const {
  if (task < prepare_tasks()) return finish_panel(task);
  if (task < finish_tasks() - 1) return finish_keys(task - prepare_tasks());
  if (shared_.bias_sums) bias_.finish();
  if (shared_.sink_sums) finish_sinks();
}

template <class T>
void AttentionBackward<T>::finish_panel(Index task) const {
  const Index number = task % plan_.panels, bh = task / plan_.panels, b = bh / p_.heads, h = bh % p_.heads;
  const Index first = number * kWidth, row = row_of(b, h, number);
  const Index count = std::min<Index>(kWidth, p_.queries - first);
  if (shared_.dq_t) {
    T* sum = dq_panel(0, row);
    for (Index g = 1; g < plan_.key_groups; ++g)
      for (Index n = 0; n < kWidth * p_.width; n += kStep) store(sum + n, load(sum + n) + load(dq_panel(g, row) + n));
    T factors[kWidth];
    std::fill_n(factors, kWidth, p_.scale);
    const Matrices<T>& grad = result_.grad_query;
    lanes_to_rows(grad.at(b, h) + first * grad.row_stride, grad.row_stride, sum, kWidth, factors, int(count), p_.width);
  }
  if (shared_.row_sums)
    for (Index q = 0; q < count; ++q) {
      T sum = 0;
      for (Index g = 0; g < plan_.key_groups; ++g) sum -= row_sums(g, row)[q];
      result_.negative_rows[bh * p_.queries + first + q] = sum;
    }
}

template <class T>
void AttentionBackward<T>::finish_keys(Index task) const {
  const Index block = task % plan_.key_blocks, bhk = task / plan_.key_blocks,
              keys_all = p_.batch * p_.key_heads * p_.keys;
  const Index end = std::min<Index>((block + 1) * kTileKeys, p_.keys);
  const auto add = [&](const T* sums, const Matrices<T>& to, Index width) {
    for (Index k = block * kTileKeys; sums && k < end; ++k) {
      T* line = to.at(bhk / p_.key_heads, bhk % p_.key_heads) + k * to.row_stride;
      for (Index c = 0; c < width; ++c) {
        T sum = 0;
        for (Index g = 0; g < plan_.query_groups; ++g)
          sum += sums[(g * keys_all + bhk * p_.keys + k) * padded(width) + c];
        line[c] = sum;
      }
    }
  };
  add(shared_.dk, result_.grad_key, p_.width);
  add(shared_.dv, result_.grad_value, p_.value_width);
}

template <class T>
void AttentionBackward<T>::finish_sinks() const {
  for (Index h = 0; h < p_.heads; ++h) {
    T sum = 0;
    for (Index b = 0; b < p_.batch; ++b)
      for (Index n = 0; n < plan_.panels; ++n) sum += shared_.sink_sums[head(b, h) * plan_.panels + n];
    result_.grad_sinks[h] = sum;
  }
}

}  // namespace attention_ops
