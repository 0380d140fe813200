// A tile of the score matrix as masks see it, the answers they give, and the place a kind is built for.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels/host_device.h"
#include "kernels/mask/spec.h"

namespace attention_ops {

enum class Cover { none, some, all };

HOST_DEVICE inline Cover cover_of(bool any, bool all) {
  return !any ? Cover::none : all ? Cover::all : Cover::some;
}
HOST_DEVICE inline Cover operator&(Cover a, Cover b) {
  return std::min(a, b);
}
HOST_DEVICE inline Cover operator|(Cover a, Cover b) {
  return std::max(a, b);
}

// Rows `rows[0 .. queries)`, or first_row and on where that is null, lie within first_row .. last_row; keys are
// first_key .. last_key.
struct Tile {
  const int32_t* rows;
  int queries;
  int32_t first_row, last_row, first_key, last_key;

  HOST_DEVICE int32_t row(int n) const { return rows ? rows[n] : first_row + n; }
  HOST_DEVICE int keys() const { return last_key - first_key + 1; }
};

// A normalised mask tensor: one stride per axis, zero where it broadcasts.
struct MaskData {
  const void* data = nullptr;
  int64_t strides[4] = {};
};

// A byte of a boolean tensor, which may be a view of any bytes: all but 0 are true. A type of its own, which no store
// of a kernel may alias.
enum class Flag : unsigned char {};

struct Flags {
  const Flag* first;

  HOST_DEVICE bool operator[](int64_t n) const { return first[n] != Flag{}; }
  HOST_DEVICE Flags operator+(int64_t n) const { return {first + n}; }
};

// The batch and head a mask is built for.
struct MaskSite {
  int64_t batch, head;
  int32_t queries, keys;
  const int64_t* arguments;
  const MaskData* data;

  // Lower-right alignment: row i stands at key i + offset.
  HOST_DEVICE int32_t offset() const { return keys - queries; }
  HOST_DEVICE const int64_t* integers(int n) const {
    return static_cast<const int64_t*>(data[n].data) + batch * data[n].strides[0];
  }
  HOST_DEVICE Flags flags(int n) const {
    return Flags{static_cast<const Flag*>(data[n].data)} + batch * data[n].strides[0];
  }
  HOST_DEVICE int32_t argument(int n) const {
    constexpr int64_t limit = std::numeric_limits<int32_t>::max();
    return static_cast<int32_t>(std::clamp(arguments[n], -limit, limit));
  }
};

HOST_DEVICE inline int32_t clamp_length(int64_t length) {
  return static_cast<int32_t>(std::clamp<int64_t>(length, 0, std::numeric_limits<int32_t>::max()));
}

}  // namespace attention_ops
