// dilated(step): j - (i + offset) is a multiple of step.
#pragma once
#include "kernels/mask/tile.h"

namespace attention_ops {

struct Dilated {
  static inline const KindInfo info{"dilated", {{.name = "step", .minimum = 1}}};
  int32_t offset, step;

  HOST_DEVICE explicit Dilated(const MaskSite& site) : offset(site.offset()), step(site.argument(0)) {}
  HOST_DEVICE Cover cover(const Tile&) const { return step == 1 ? Cover::all : Cover::some; }
  HOST_DEVICE bool visible(int32_t i, int32_t j) const { return (j - i - offset) % step == 0; }
};

}  // namespace attention_ops
