// sliding_window(left, right): -left <= j - (i + offset) <= right.
#pragma once
#include "kernels/mask/tile.h"

namespace attention_ops {

struct SlidingWindow {
  static inline const KindInfo info{
      "sliding_window", {{.name = "left", .may_be_unbounded = true}, {.name = "right", .may_be_unbounded = true}}};
  int64_t low, high;  // bounds of j - i

  HOST_DEVICE explicit SlidingWindow(const MaskSite& site)
      : low(int64_t(site.offset()) - site.argument(0)), high(int64_t(site.offset()) + site.argument(1)) {
    constexpr int64_t least = std::numeric_limits<int32_t>::min(), most = std::numeric_limits<int32_t>::max();
    low = std::clamp(low, least, most), high = std::clamp(high, least, most);
  }
  HOST_DEVICE Cover cover(const Tile& t) const {
    const int64_t least = int64_t(t.first_key) - t.last_row, most = int64_t(t.last_key) - t.first_row;
    return cover_of(low <= high && most >= low && least <= high, least >= low && most <= high);
  }
  HOST_DEVICE bool visible(int32_t i, int32_t j) const {
    const int32_t d = j - i;
    return (d >= static_cast<int32_t>(low)) & (d <= static_cast<int32_t>(high));
  }
};

}  // namespace attention_ops
