// global_tokens: a flagged position sees all and is seen by all, flags[i] or flags[j].
#pragma once
#include "kernels/mask/tile.h"

namespace attention_ops {

struct GlobalTokens {
  static inline const KindInfo info{"global_tokens", {}, {{"flags", "BL", false}}};
  const bool* flags;
  int64_t stride;

  explicit GlobalTokens(const MaskSite& site) : flags(site.flags(0)), stride(site.data[0].strides[1]) {}
  Cover cover(const Tile& t) const {
    const Cover rows = range(t.first_row, t.last_row), keys = range(t.first_key, t.last_key);
    return rows | keys;
  }
  bool visible(int32_t i, int32_t j) const { return flags[i * stride] | flags[j * stride]; }

 private:
  Cover range(int32_t first, int32_t last) const {
    bool any = false, all = true;
    for (int64_t x = first; x <= last; ++x) any |= flags[x * stride], all &= flags[x * stride];
    return cover_of(any, all);
  }
};

}  // namespace attention_ops
