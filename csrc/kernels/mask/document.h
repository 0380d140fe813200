// document: query and key belong to the same document, ids[i] == ids[j].
#pragma once
#include <utility>

#include "kernels/mask/tile.h"

namespace attention_ops {

struct Document {
  static inline const KindInfo info{"document", {}, {{"ids", "BL", true}}};
  const int64_t* ids;
  int64_t stride;

  HOST_DEVICE explicit Document(const MaskSite& site) : ids(site.integers(0)), stride(site.data[0].strides[1]) {}
  HOST_DEVICE Cover cover(const Tile& t) const {
    const auto [query_low, query_high] = range_of_rows(t);
    const auto [key_low, key_high] = range_of(t.first_key, t.keys());
    const bool disjoint = query_high < key_low || key_high < query_low;
    return cover_of(!disjoint, query_low == query_high && key_low == key_high);
  }
  HOST_DEVICE bool visible(int32_t i, int32_t j) const { return ids[i * stride] == ids[j * stride]; }

 private:
  using Range = std::pair<int64_t, int64_t>;

  HOST_DEVICE Range range_of_rows(const Tile& t) const {
    const int32_t places = t.last_row - t.first_row + 1;  // those between are no fault: the range is then too large
    if (places <= t.queries) return range_of(t.first_row, places);
    return range(t.queries, [&](int n) { return ids[t.row(n) * stride]; });
  }
  HOST_DEVICE Range range_of(int32_t first, int count) const {
    const int64_t* from = ids + first * stride;
    if (stride == 1) return range(count, [&](int n) { return from[n]; });  // becomes vectors
    return range(count, [&](int n) { return from[n * stride]; });
  }
  template <class Id>
  HOST_DEVICE static Range range(int count, Id&& id) {
    int64_t low = id(0), high = low;
    for (int n = 1; n < count; ++n) low = std::min(low, id(n)), high = std::max(high, id(n));
    return {low, high};
  }
};

}  // namespace attention_ops
