// AttentionBackward of pairs: whole tiles are kept, as rounded operands, until products that sum over several of them
// are one: over panels for the gradients of keys and values, over tiles of keys for that of the queries.
#pragma once
#include "kernels/cpu/attention_backward.h"

namespace attention_ops {

// A whole tile of plain scores in one pass over blocks of keys whose scores and gradients stay in the first cache; p
// and ds are kept rounded. True if that is done.
template <class T, class E>
bool AttentionBackward<T, E>::run_plain_pairs(const Work& work, Block& block, Scratch& w, const Site<T, E>& site,
                                              const Panels& panel, Index number) const {
  const Index row = row_of(site.b, site.h, number);
  if (!p_.is_plain() || shared_.row_sums || !source_.has_values() || !is_finite(block, row)) return false;
  if (w.tile.cover != Cover::all || !is_whole(w.tile) || panel.count < kWidth) return false;
  const E *k = site.k + block.key * p_.k.row_stride, *v = site.v + block.key * p_.v.row_stride;
  const E* do_t = do_panel(shared_.rows, row);
  T *const s = w.tile.s, *const dp = w.dp;
  const T* const delta = shared_.delta + row;
  const RowNorm<T> norm{shared_.norm.base + row, shared_.norm.log2_l + row};
  const Vec<T> factor = splat(p_.query_factor());
  const auto [p, ds, ds_t] = places(work, block, w, site, number);
  for (int key = 0; key < kTileKeys; key += kPairBlockKeys) {
    multiply_pairs<false>(s, kWidth, {k + key * p_.k.row_stride, p_.k.row_stride}, {panel.q_t, 2 * kWidth},
                          kPairBlockKeys, Panels::kVectors, p_.width);
    multiply_pairs<false>(dp, kWidth, {v + key * p_.v.row_stride, p_.v.row_stride}, {do_t, 2 * kWidth}, kPairBlockKeys,
                          Panels::kVectors, p_.value_width);
    for (int n = 0; n < kPairBlockKeys; n += 2)
      for (int lane = 0; lane < kWidth; lane += kStep) {
        Vec<T> both[2];
        for (int i = 0; i < 2; ++i) {
          const Index from = (n + i) * kWidth + lane, to = (key + n + i) * kPendingLanes + lane;
          const Vec<T> weight = exp2<T, E>(norm.log2_weight(factor * load(s + from), lane));
          both[i] = weight * (load(dp + from) - load(delta + lane));
          write_elements(p + to, weight, kStep);
          write_elements(ds + to, both[i], kStep);
        }
        store_pairs(ds_t + (key + n) * kWidth + 2 * lane, round_pairs(both[0], both[1]));
      }
  }
  return true;
}

// Rounds a whole tile for later products that sum over its neighbours too.
template <class T, class E>
void AttentionBackward<T, E>::defer(const Term& term, const Work& work, Block& block, Scratch& w,
                                    const Site<T, E>& site, Index number) const {
  if constexpr (kPaired<E>) {
    const auto [p, ds, ds_t] = places(work, block, w, site, number);
    if (block.dv) round_along(p, kPendingLanes, term.p, kWidth, 0, kTileKeys, 0, kWidth);
    if (block.dk) round_along(ds, kPendingLanes, term.ds, kWidth, 0, kTileKeys, 0, kWidth);
    if (shared_.dq_t) round_across(ds_t, term.ds, kWidth, 0, kTileKeys, Panels::kVectors);
  }
}

// Where p, ds and the pair panel of ds of the next tile are kept; what is no neighbour of it is multiplied first.
template <class T, class E>
typename AttentionBackward<T, E>::Places AttentionBackward<T, E>::places(const Work& work, Block& block, Scratch& w,
                                                                         const Site<T, E>& site, Index number) const {
  const Index tile = block.key / kTileKeys;
  if (!block.panels.accepts(number)) add_pending_to_keys(block, site);
  if (!w.tiles.accepts(tile)) add_pending_to_queries(work, w, site, number);
  const Index place = block.panels.add(number) * kWidth;
  return {block.p + place, block.ds + place, w.ds_t + w.tiles.add(tile) * kTileKeys * kWidth};
}

template <class T, class E>
void AttentionBackward<T, E>::add_pending_to_keys(Block& block, const Site<T, E>& site) const {
  if constexpr (kPaired<E>) {
    const Pending panels = std::exchange(block.panels, {});
    const auto add = [&](T* out, const E* a, const E* padded_rows, Index width) {
      if (!out || !padded_rows || panels.count == 0) return;
      multiply_pairs<true>(out, padded(width), {a, kPendingLanes},
                           rows_of(padded_rows, {}, site.b, site.h, panels.first, width), kTileKeys,
                           padded(width) / kStep, panels.count * kWidth);
    };
    add(block.dv, block.p, shared_.rows.do_rows, p_.value_width);
    add(block.dk, block.ds, shared_.rows.q_rows, p_.width);
  }
}

template <class T, class E>
void AttentionBackward<T, E>::add_pending_to_queries(const Work& work, Scratch& w, const Site<T, E>& site,
                                                     Index number) const {
  if constexpr (kPaired<E>)
    if (const Pending tiles = std::exchange(w.tiles, {}); tiles.count > 0 && shared_.dq_t)
      multiply_pairs<true>(dq_panel(work.key_group, row_of(site.b, site.h, number)), kWidth,
                           columns_.at(site.b, site.h / p_.group(), tiles.first * kTileKeys), {w.ds_t, 2 * kWidth},
                           p_.width, Panels::kVectors, tiles.count * kTileKeys);
}

}  // namespace attention_ops
