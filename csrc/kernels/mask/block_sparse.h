// block_sparse(block): layout[i / block, j / block].
#pragma once
#include "kernels/mask/tile.h"

namespace attention_ops {

struct BlockSparse {
  static inline const KindInfo info{"block_sparse", {{.name = "block", .minimum = 1}}, {{"layout", "BHrc", false}}};
  Flags layout;
  int64_t row_stride, column_stride;
  int32_t block;

  HOST_DEVICE explicit BlockSparse(const MaskSite& site)
      : layout(site.flags(0) + site.head * site.data[0].strides[1]),
        row_stride(site.data[0].strides[2]),
        column_stride(site.data[0].strides[3]),
        block(site.argument(0)) {}
  HOST_DEVICE Cover cover(const Tile& t) const {
    bool any = false, all = true;
    for (int64_t r = t.first_row / block; r <= t.last_row / block; ++r)
      for (int64_t c = t.first_key / block; c <= t.last_key / block; ++c) {
        const bool present = layout[r * row_stride + c * column_stride];
        any |= present, all &= present;
      }
    return cover_of(any, all);
  }
  HOST_DEVICE bool visible(int32_t i, int32_t j) const {
    return layout[(i / block) * row_stride + (j / block) * column_stride];
  }
};

}  // namespace attention_ops
