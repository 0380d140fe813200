// ranges: each query sees one run of keys, start[i] <= j < end[i].
#pragma once
#include "kernels/mask/tile.h"

namespace attention_ops {

struct Ranges {
  static inline const KindInfo info{"ranges", {}, {{"start", "BHq", true}, {"end", "BHq", true}}};
  const int64_t *start, *end;
  int64_t start_stride, end_stride;

  HOST_DEVICE explicit Ranges(const MaskSite& site)
      : start(site.integers(0) + site.head * site.data[0].strides[1]),
        end(site.integers(1) + site.head * site.data[1].strides[1]),
        start_stride(site.data[0].strides[2]),
        end_stride(site.data[1].strides[2]) {}
  HOST_DEVICE Cover cover(const Tile& t) const {
    bool any = false, all = true;
    for (int q = 0; q < t.queries; ++q) {
      const int64_t i = t.row(q), from = start[i * start_stride], to = end[i * end_stride];
      any |= from < to && from <= t.last_key && to > t.first_key;
      all &= from <= t.first_key && to > t.last_key;
    }
    return cover_of(any, all);
  }
  HOST_DEVICE bool visible(int32_t i, int32_t j) const {
    return (start[i * start_stride] <= j) & (j < end[i * end_stride]);
  }
};

}  // namespace attention_ops
