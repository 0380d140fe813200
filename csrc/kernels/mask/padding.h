// padding: key j is real, j < lengths[b].
#pragma once
#include "kernels/mask/tile.h"

namespace attention_ops {

struct Padding {
  static inline const KindInfo info{"padding", {}, {{"lengths", "B", true}}};
  int32_t length;

  HOST_DEVICE explicit Padding(const MaskSite& site) : length(clamp_length(*site.integers(0))) {}
  HOST_DEVICE Cover cover(const Tile& t) const { return cover_of(t.first_key < length, t.last_key < length); }
  HOST_DEVICE bool visible(int32_t, int32_t j) const { return j < length; }
};

}  // namespace attention_ops
