// global_tokens: a flagged position sees all and is seen by all, flags[i] or flags[j].
#pragma once
#include "kernels/mask/tile.h"

namespace attention_ops {

struct GlobalTokens {
  static inline const KindInfo info{"global_tokens", {}, {{"flags", "BL", false}}};
  Flags flags;
  int64_t stride;

  HOST_DEVICE explicit GlobalTokens(const MaskSite& site) : flags(site.flags(0)), stride(site.data[0].strides[1]) {}
  HOST_DEVICE Cover cover(const Tile& t) const {
    return range(t.queries, [&](int n) { return t.row(n); }) | range(t.keys(), [&](int n) { return t.first_key + n; });
  }
  HOST_DEVICE bool visible(int32_t i, int32_t j) const { return flags[i * stride] | flags[j * stride]; }

 private:
  template <class Place>
  HOST_DEVICE Cover range(int count, Place&& place) const {
    bool any = false, all = true;
    for (int n = 0; n < count; ++n) {
      const bool flag = flags[place(n) * stride];
      any |= flag, all &= flag;
    }
    return cover_of(any, all);
  }
};

}  // namespace attention_ops
