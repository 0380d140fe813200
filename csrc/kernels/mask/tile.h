// A tile of the score matrix as masks see it, the answers they give, and the place a kind is built for.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels/mask/spec.h"

namespace attention_ops {

enum class Cover { none, some, all };

inline Cover cover_of(bool any, bool all) {
  return !any ? Cover::none : all ? Cover::all : Cover::some;
}
inline Cover operator&(Cover a, Cover b) {
  return std::min(a, b);
}
inline Cover operator|(Cover a, Cover b) {
  return std::max(a, b);
}

// Rows `rows[0 .. queries)` lie within first_row .. last_row; keys are first_key .. last_key.
struct Tile {
  const int32_t* rows;
  int queries;
  int32_t first_row, last_row, first_key, last_key;

  int keys() const { return last_key - first_key + 1; }
};

// A normalised mask tensor: one stride per axis, zero where it broadcasts.
struct MaskData {
  const void* data = nullptr;
  int64_t strides[4] = {};
};

// The batch and head a mask is built for.
struct MaskSite {
  int64_t batch, head;
  int32_t queries, keys;
  const int64_t* arguments;
  const MaskData* data;

  int32_t offset() const { return keys - queries; }  // lower-right alignment: row i stands at key i + offset
  const int64_t* integers(int n) const {
    return static_cast<const int64_t*>(data[n].data) + batch * data[n].strides[0];
  }
  const bool* flags(int n) const { return static_cast<const bool*>(data[n].data) + batch * data[n].strides[0]; }
  int32_t argument(int n) const {
    constexpr int64_t limit = std::numeric_limits<int32_t>::max();
    return static_cast<int32_t>(std::clamp(arguments[n], -limit, limit));
  }
};

inline int32_t clamp_length(int64_t length) {
  return static_cast<int32_t>(std::clamp<int64_t>(length, 0, std::numeric_limits<int32_t>::max()));
}

}  // namespace attention_ops
