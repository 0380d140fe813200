// dense: the element of a boolean tensor that broadcasts to [B, H, Lq, Lk].
#pragma once
#include "kernels/mask/tile.h"

namespace attention_ops {

struct Dense {
  static inline const KindInfo info{"dense", {}, {{"mask", "BHqk", false}}};
  Flags mask;
  int64_t row_stride, key_stride;

  HOST_DEVICE explicit Dense(const MaskSite& site)
      : mask(site.flags(0) + site.head * site.data[0].strides[1]),
        row_stride(site.data[0].strides[2]),
        key_stride(site.data[0].strides[3]) {}
  HOST_DEVICE Cover cover(const Tile&) const { return Cover::some; }  // reading the elements is the only way to know
  HOST_DEVICE bool visible(int32_t i, int32_t j) const { return mask[i * row_stride + j * key_stride]; }
};

}  // namespace attention_ops
