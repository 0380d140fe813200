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
    const auto [query_low, query_high] = range(t.queries, [&](int n) { return t.row(n); });
    const auto [key_low, key_high] = range(t.keys(), [&](int n) { return t.first_key + n; });
    const bool disjoint = query_high < key_low || key_high < query_low;
    return cover_of(!disjoint, query_low == query_high && key_low == key_high);
  }
  HOST_DEVICE bool visible(int32_t i, int32_t j) const { return ids[i * stride] == ids[j * stride]; }

 private:
  template <class Place>
  HOST_DEVICE std::pair<int64_t, int64_t> range(int count, Place&& place) const {
    int64_t low = ids[place(0) * stride], high = low;
    for (int n = 1; n < count; ++n) {
      const int64_t id = ids[place(n) * stride];
      low = std::min(low, id), high = std::max(high, id);
    }
    return {low, high};
  }
};

}  // namespace attention_ops
