// prefix_lm: causal, or the key is in the prefix, j < lengths[b].
#pragma once
#include "kernels/mask/tile.h"

namespace attention_ops {

struct PrefixLm {
  static inline const KindInfo info{"prefix_lm", {}, {{"lengths", "B", true}}};
  int32_t offset, length;

  HOST_DEVICE explicit PrefixLm(const MaskSite& site)
      : offset(site.offset()), length(clamp_length(*site.integers(0))) {}
  HOST_DEVICE Cover cover(const Tile& t) const {
    return cover_of(t.first_key < length || t.first_key <= t.last_row + offset,
                    t.last_key < length || t.last_key <= t.first_row + offset);
  }
  HOST_DEVICE bool visible(int32_t i, int32_t j) const { return (j < length) | (j - i <= offset); }
};

}  // namespace attention_ops
