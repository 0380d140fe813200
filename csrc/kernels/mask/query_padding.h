// query_padding: query i is real, i < lengths[b]; rows past it see nothing.
#pragma once
#include "kernels/mask/tile.h"

namespace attention_ops {

struct QueryPadding {
  static inline const KindInfo info{"query_padding", {}, {{"lengths", "B", true}}};
  int32_t length;

  HOST_DEVICE explicit QueryPadding(const MaskSite& site) : length(clamp_length(*site.integers(0))) {}
  HOST_DEVICE Cover cover(const Tile& t) const { return cover_of(t.first_row < length, t.last_row < length); }
  HOST_DEVICE bool visible(int32_t i, int32_t) const { return i < length; }
};

}  // namespace attention_ops
