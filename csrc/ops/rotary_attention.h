// Query and key turned by a table of the keys' positions, of which the queries have the last rows.
#pragma once
#include <ATen/ops/narrow.h>

#include "ops/ops.h"

namespace attention_ops {

class Turn {
 public:
  Turn(In table, bool interleaved) : table_(table), interleaved_(interleaved) {}

  Tensor keys(In x, bool inverse = false) const { return rope().call(x, table_, interleaved_, inverse); }
  Tensor queries(In x, bool inverse = false) const {
    const auto length = x.sym_size(2);
    return rope().call(x, table_.narrow_symint(1, table_.sym_size(1) - length, length), interleaved_, inverse);
  }

 private:
  In table_;
  bool interleaved_;
};

// A call's arguments with query and key turned. Borrows the rest.
class Turned {
 public:
  Turned(const Attention& a, const Turn& turn) : query_(turn.queries(a.query)), key_(turn.keys(a.key)), of_(a) {}
  Attention view() const { return of_.with_rows(query_, key_); }

 private:
  Tensor query_, key_;
  const Attention& of_;
};

// The gradients, by operators that have derivatives of their own.
inline Six rotary_gradients(const Attention& a, In table, bool interleaved, In out, In lse, Opt grad_out, Opt grad_lse,
                            std::array<bool, 6> needed) {
  const Turn turn(table, interleaved);
  auto [query, key, value, bias, distance, sinks] =
      backward().call(Turned(a, turn).view(), out, lse, grad_out, grad_lse, needed);
  if (needed[0]) query = turn.queries(query, /*inverse=*/true);
  if (needed[1]) key = turn.keys(key, true);
  return {query, key, value, bias, distance, sinks};
}

}  // namespace attention_ops
