// document: query and key belong to the same document, ids[i] == ids[j].
#pragma once
#include <utility>

#include "kernels/mask/tile.h"

namespace attention_ops {

struct Document {
  static inline const KindInfo info{"document", {}, {{"ids", "BL", true}}};
  const int64_t* ids;
  int64_t stride;

  explicit Document(const MaskSite& site) : ids(site.integers(0)), stride(site.data[0].strides[1]) {}
  Cover cover(const Tile& t) const {
    const auto [query_low, query_high] = range(t.first_row, t.last_row);
    const auto [key_low, key_high] = range(t.first_key, t.last_key);
    const bool disjoint = query_high < key_low || key_high < query_low;
    return cover_of(!disjoint, query_low == query_high && key_low == key_high);
  }
  bool visible(int32_t i, int32_t j) const { return ids[i * stride] == ids[j * stride]; }

 private:
  std::pair<int64_t, int64_t> range(int32_t first, int32_t last) const {
    int64_t low = ids[first * stride], high = low;
    for (int64_t x = first + 1; x <= last; ++x) {
      low = std::min(low, ids[x * stride]);
      high = std::max(high, ids[x * stride]);
    }
    return {low, high};
  }
};

}  // namespace attention_ops
