// causal: j <= i + offset; the last query sees the last key (lower_right), or the first the first (upper_left).
#pragma once
#include "kernels/mask/tile.h"

namespace attention_ops {

struct Causal {
  static inline const KindInfo info{
      "causal", {{.name = "alignment", .words = {"lower_right", "upper_left"}, .has_default = true}}};
  int32_t offset;

  HOST_DEVICE explicit Causal(const MaskSite& site) : offset(site.arguments[0] == 0 ? site.offset() : 0) {}
  HOST_DEVICE Cover cover(const Tile& t) const {
    return cover_of(t.first_key <= t.last_row + offset, t.last_key <= t.first_row + offset);
  }
  HOST_DEVICE bool visible(int32_t i, int32_t j) const { return j - i <= offset; }
};

}  // namespace attention_ops
