// When a forward pass has few rows to many keys, as in decoding, and reading k and v is what it costs.
#pragma once
#include "kernels/view.h"

namespace attention_ops {

constexpr Index kDecodeRows = 16;  // most rows of a key head: its query heads times the queries

inline bool is_decode(Index heads, Index key_heads, Index queries) {
  return heads * queries > 0 && heads * queries <= kDecodeRows * key_heads;
}

}  // namespace attention_ops
