// One tile of AttentionBackward's second pass: weights, the gradients of scores, and what they add.
#pragma once
#include "kernels/cpu/attention_backward.h"

namespace attention_ops {

template <class T, class E>
PaddedRows<E> AttentionBackward<T, E>::rows_of(const E* padded_rows, const Matrices<const E>& natural, Index b, Index h,
                                               Index panel, Index width) const {
  constexpr int kTogether = kPaired<E> ? 2 : 1;
  if (padded_rows) return {padded_rows + row_of(b, h, panel) * padded(width), kTogether * padded(width)};
  return {natural.at(b, h) + panel * kWidth * natural.row_stride, natural.row_stride};
}

template <class T, class E>
void AttentionBackward<T, E>::run_tile(const Work& work, Block& block, Scratch& w, const Site<T, E>& site,
                                       const Panels& panel, Index number) const {
  find_cover(w.tile, site, panel, block.key, block.keys);
  const auto add_bias = [&](const T* ds) {
    if (bias_.on()) bias_.add(w.bias, w.tile, ds, site.b, site.h, number, block.key, block.keys);
  };
  if (w.tile.cover == Cover::none) return add_bias(nullptr);
  ++w.visited;
  const Index row = row_of(site.b, site.h, number);
  begin_sums(work.key_group, row);
  if constexpr (kPaired<E>)
    if (run_plain_pairs(work, block, w, site, panel, number)) return;
  compute_weights(block, w, site, panel, row);
  compute_tangent(block, w, site, panel, row);
  fill_gradients(block, w, site, panel, row);
  score_gradient(w, row, panel.count);
  const T* ds = along_ ? w.dp_dot : w.dp;
  add_bias(ds);
  if (distance_.on())
    distance_.add_bias(distance_.sums(work.key_group, work.query_group, site.b, site.h), w.tile, ds, panel, block.key,
                       block.keys);
  if (shared_.row_sums) {
    T* sums = row_sums(work.key_group, row);
    each_vector<T, kWidth>(w.tile, [&](Index n, int lane) { store(sums + lane, load(sums + lane) + load(ds + n)); });
  }
  if (w.tile.tanh) through_softcap(w);
  if (w.keep) {
    each_vector<T, kWidth>(w.tile, [&](Index n, int) { drop(w.tile.s + n, load_lanes<T>(w.keep + n)); });
    if (along_) each_vector<T, kWidth>(w.tile, [&](Index n, int) { drop(w.dot.s + n, load_lanes<T>(w.keep + n)); });
  }
  add_terms(work, block, w, site, panel, number);
}

// The partial sums of a panel are cleared where they are first needed: under most masks few groups of keys see it.
template <class T, class E>
void AttentionBackward<T, E>::begin_sums(Index key_group, Index row) const {
  if (summed(key_group, row)) return;
  summed(key_group, row) = true;
  if (shared_.dq_t) std::fill_n(dq_panel(key_group, row), kWidth * dq_width(), T(0));
  if (shared_.row_sums) std::fill_n(row_sums(key_group, row), kWidth, T(0));
}

// p = exp(s - lse), in place of s
template <class T, class E>
void AttentionBackward<T, E>::compute_weights(const Block& block, Scratch& w, const Site<T, E>& site,
                                              const Panels& panel, Index row) const {
  each_span(w.tile, [&](auto vectors, const Span& span) {
    const auto exponent = [&](Vec<T> s, Index n, int v) {
      const Vec<T> x = shared_.norm.log2_weight(s, row + (span.vector + v) * kStep);
      if (w.log2_p) store(w.log2_p + n, x);
      return x;
    };
    span_weights<T, vectors>(w.tile, site, panel, block.key, span, exponent, [](Vec<T>, int) {});
  });
}

// The tangent of log p: s_dot - lse_dot, in place of s_dot
template <class T, class E>
void AttentionBackward<T, E>::compute_tangent(const Block& block, Scratch& w, const Site<T, E>& site,
                                              const Panels& panel, Index row) const {
  if constexpr (kTwice) {
    if (!along_) return;
    compute_tangents(w.dot, w.tile, site, panel, along_->of, q_panel(shared_.rows_dot, row), block.key, block.keys);
    each_vector<T, kWidth>(
        w.tile, [&](Index n, int lane) { store(w.dot.s + n, load(w.dot.s + n) - load(shared_.lse_dot + row + lane)); });
  }
}

// dp, and in a second derivative dp_dot, both after dropout
template <class T, class E>
void AttentionBackward<T, E>::fill_gradients(const Block& block, Scratch& w, const Site<T, E>& site,
                                             const Panels& panel, Index row) const {
  const auto values = [&](const Matrices<const E>& v) {
    return PaddedRows<E>{v.at(site.b, site.h / p_.group()) + block.key * v.row_stride, v.row_stride};
  };
  GradientTile<T, E> at{site.b,      site.h,     panel.first,  block.key,
                        panel.count, block.keys, values(p_.v), do_panel(shared_.rows, row),
                        w.log2_p,    w.tile};
  source_.fill(w.dp, at);
  const auto add_rows = [&](T* to, const DistanceTable<T>& table, const E* panel_t) {
    if constexpr (kTwice)
      for (int n = 0; panel_t && table.defined() && n < w.tile.number_of_spans; ++n)
        multiply_by_distance<true>(to, w.tile, w.tile.spans[n], table, 1 + p_.width, panel_t, p_.value_width, site,
                                   panel, block.key);
  };
  const bool has_rows = p_.distance.has_values && source_.has_values();
  if (has_rows) add_rows(w.dp, p_.distance, at.do_t);
  if constexpr (kTwice)
    if (along_) {
      if (along_->of.v.data) at.v_dot = values(along_->of.v);
      at.do_dot_t = do_panel(shared_.rows_dot, row);
      at.log_p_dot = w.dot.s;
      source_.fill_tangent(w.dp_dot, at);
      if (has_rows) add_rows(w.dp_dot, p_.distance, at.do_dot_t), add_rows(w.dp_dot, along_->of.distance, at.do_t);
    }
  if (!w.keep) return;
  each_kept(site, panel, block.key, w.tile,
            [&, keep = w.keep, dp = w.dp, dp_dot = along_ ? w.dp_dot : nullptr](Index n, Ints<T> kept) {
              store_lanes<T>(keep + n, kept);
              drop(dp + n, kept);
              if (dp_dot) drop(dp_dot + n, kept);
            });
}

// ds = p (dp - delta), in place of dp, and the tangents of p and ds in place of those of log p and dp. All become 0
// where masked or past the last row.
template <class T, class E>
void AttentionBackward<T, E>::score_gradient(const Scratch& w, Index row, int rows) const {
  const bool all = w.tile.cover == Cover::all, ragged = rows % kStep != 0, plain = all && !ragged, twice = along_;
  T *const s = w.tile.s, *const dp = w.dp;
  const T* const delta = shared_.delta + row;
  if (plain && !twice)  // a loop of its own: of the other one the compiler hoists nothing
    return each_vector<T, kWidth>(
        w.tile, [&](Index n, int lane) { store(dp + n, load(s + n) * (load(dp + n) - load(delta + lane))); });
  alignas(kVectorBytes) LaneInt<T> real[kWidth];
  for (int q = 0; q < kWidth; ++q) real[q] = q < rows ? -1 : 0;
  const auto put = [&](T* to, Vec<T> x, Index n, int lane) {
    if (plain) return store(to + n, x);
    const Ints<T> keep = load_lanes<T>(real + lane) & (all ? ~Ints<T>{} : load_lanes<T>(w.tile.visible + n));
    store(to + n, keep ? x : Vec<T>{});
  };
  each_vector<T, kWidth>(w.tile, [&](Index n, int lane) {
    const Vec<T> p = load(s + n), above = load(dp + n) - load(delta + lane);
    put(dp, p * above, n, lane);
    if (!plain) put(s, p, n, lane);
    if (!twice) return;
    const Vec<T> p_dot = p * load(w.dot.s + n), above_dot = load(w.dp_dot + n) - load(shared_.delta_dot + row + lane);
    put(w.dot.s, p_dot, n, lane);
    put(w.dp_dot, fma(p_dot, above, p * above_dot), n, lane);
  });
}

// From the gradient of scores to that of products: dx in place of ds.
template <class T, class E>
void AttentionBackward<T, E>::through_softcap(const Scratch& w) const {
  each_vector<T, kWidth>(w.tile, [&](Index n, int) {
    const Vec<T> t = load(w.tile.tanh + n), slope = splat(T(1)) - t * t, ds = load(w.dp + n);
    store(w.dp + n, slope * ds);
    if (!along_) return;
    const Vec<T> bend = splat(T(-2)) * t * slope * load(w.dot.x + n);  // the tangent of the slope
    store(w.dp_dot + n, fma(slope, load(w.dp_dot + n), ds == Vec<T>{} ? Vec<T>{} : bend * ds));
  });
}

// What the tile gives to the gradients of key, value and query.
template <class T, class E>
void AttentionBackward<T, E>::add_terms(const Work& work, Block& block, Scratch& w, const Site<T, E>& site,
                                        const Panels& panel, Index number) const {
  if constexpr (kTwice)
    if (along_) {
      add_tile({w.dot.s, w.dp_dot, p_.q, p_.k, in_.grad_out, shared_.rows, p_.distance}, work, block, w, site, panel,
               number);
      const Tangents<T>& along = along_->of;
      return add_tile({w.tile.s, w.dp, along.q, along.k, along_->grad_out, shared_.rows_dot, along.distance}, work,
                      block, w, site, panel, number);
    }
  add_tile({w.tile.s, w.dp, p_.q, p_.k, in_.grad_out, shared_.rows, p_.distance}, work, block, w, site, panel, number);
}

template <class T, class E>
void AttentionBackward<T, E>::add_tile(const Term& term, const Work& work, Block& block, Scratch& w,
                                       const Site<T, E>& site, const Panels& panel, Index number) const {
  const Index row = row_of(site.b, site.h, number);
  if constexpr (kTwice)
    if (p_.distance.has_keys) add_by_distance(term, work, block, w, site, panel, number);
  // Masked places may hold anything: where a row of the tile is not finite, only visible pairs are multiplied.
  const bool finite = is_finite(block, row);
  if (!finite && (kPaired<E> || w.tile.cover != Cover::all)) {
    add_visible(term, work, block, w, site, panel, row);
    if (!kPaired<E>) return;
  }
  if (kPaired<E> && is_whole(w.tile)) return defer(term, work, block, w, site, number);
  const auto rows = [&](const E* padded_rows, const Matrices<const E>& natural, Index width) {
    return rows_of(padded_rows, natural, site.b, site.h, number, width);
  };
  each_span(w.tile, [&](auto vectors, const Span& span) {
    if (block.dv && term.grad_out.data)
      add_to_keys<vectors>(block.dv, w, term.p, rows(term.rows.do_rows, term.grad_out, p_.value_width),
                           padded(p_.value_width), span, panel.count);
    if (block.dk && term.q.data)
      add_to_keys<vectors>(block.dk, w, term.ds, rows(term.rows.q_rows, term.q, p_.width), padded(p_.width), span,
                           panel.count);
    if (shared_.dq_t && term.k.data)
      add_to_queries<vectors>(dq_panel(work.key_group, row), w, term, site, block.key, span);
  });
}

// dq += dx a, da += dx' q, db += p' do
template <class T, class E>
void AttentionBackward<T, E>::add_by_distance(const Term& term, const Work& work, const Block& block, const Scratch& w,
                                              const Site<T, E>& site, const Panels& panel, Index number) const {
  const Index row = row_of(site.b, site.h, number);
  const Index sums = distance_.sums(work.key_group, work.query_group, site.b, site.h);
  // da or db += a' rows, from column c of the sums on
  const auto add_rows = [&](const T* a, const E* padded_rows, const Matrices<const E>& natural, Index c, Index width,
                            const Span& span) {
    const PaddedRows<E> rows = rows_of(padded_rows, natural, site.b, site.h, number, width);
    each_skew_block(span, p_.distance, 1, site, panel, block.key,
                    [&](Index n, int lane, const SkewBlock& part, const PaddedRows<T>&) {
                      w.tile.skew.spread(a + n, kWidth, part);
                      distance_.add_rows(sums, c, padded(width), w.tile.skew, part,
                                         {rows.data + lane * rows.stride, rows.stride}, shared_.finite[row / kWidth]);
                    });
  };
  each_span(w.tile, [&](auto, const Span& span) {
    if (shared_.dq_t && term.distance.defined())
      add_to_queries_by_distance(dq_panel(work.key_group, row), term.ds, w.tile, span, term.distance, 1, p_.width, site,
                                 panel, block.key);
    if (!distance_.on()) return;
    if (term.q.data) add_rows(term.ds, term.rows.q_rows, term.q, 0, p_.width, span);
    if (p_.distance.has_values && term.grad_out.data)
      add_rows(term.p, term.rows.do_rows, term.grad_out, padded(p_.width), p_.value_width, span);
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
    round_along(w.rounded, kWidth, a, kWidth, span.key, span.key + span.keys, first, first + NV * kStep);
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
void AttentionBackward<T, E>::add_to_queries(T* dq, const Scratch& w, const Term& term, const Site<T, E>& site,
                                             Index key, const Span& span) const {
  const Index lane = span.vector * kStep;
  dq += lane;
  if constexpr (kPaired<E>) {
    const int first = span.key / kPairDepth * kPairDepth;
    const PiecedRows k = columns_.at(site.b, site.h / p_.group(), key);
    round_across(w.rounded + 2 * lane, term.ds + lane, kWidth, span.key, span.key + span.keys, NV);
    multiply_pairs<true>(dq, kWidth, {k.data + first, k.stride}, {w.rounded + first * kWidth + 2 * lane, 2 * kWidth},
                         p_.width, NV, span.key + span.keys - first);
  } else {
    const Index stride = term.k.row_stride;
    const T* k = term.k.at(site.b, site.h / p_.group()) + (key + span.key) * stride;
    const T* ds = term.ds + span.key * kWidth + lane;
    add_to_lanes<kWidth, NV>(dq, k, stride, ds, p_.width, span.keys);
  }
}

// add_tile without touching what masked places hold; of pairs only what products lack.
template <class T, class E>
void AttentionBackward<T, E>::add_visible(const Term& term, const Work& work, const Block& block, const Scratch& w,
                                          const Site<T, E>& site, const Panels& panel, Index row) const {
  const LaneInt<T>* visible = w.tile.cover == Cover::some ? w.tile.visible : nullptr;
  const auto rows = [&](const Matrices<const E>& x, Index head, Index first) {
    return PaddedRows<E>{x.at(site.b, head) + first * x.row_stride, x.row_stride};
  };
  each_span(w.tile, [&](auto vectors, const Span& span) {
    if (block.dv && term.grad_out.data)
      add_visible_to_keys(block.dv, term.p, rows(term.grad_out, site.h, panel.first), p_.value_width, span, panel.count,
                          visible);
    if (block.dk && term.q.data)
      add_visible_to_keys(block.dk, term.ds, rows(term.q, site.h, panel.first), p_.width, span, panel.count, visible);
    if (!shared_.dq_t || !term.k.data) return;
    const PaddedRows<E> k = rows(term.k, site.h / p_.group(), block.key + span.key);
    const Index lane = span.vector * kStep, first = span.key * kWidth + lane;
    add_visible_to_lanes<kWidth, vectors>(dq_panel(work.key_group, row) + lane, k.data, k.stride, term.ds + first,
                                          p_.width, span.keys, visible ? visible + first : nullptr);
  });
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

}  // namespace attention_ops
