// Query and key turned by a table of the keys' positions, of which the queries have the last rows.
#pragma once
#include <ATen/ops/narrow.h>

#include "ops/ops.h"

namespace attention_ops {

inline Tensor rows_of_queries(In table, In query) {
  const auto length = query.sym_size(2);
  return table.narrow_symint(1, table.sym_size(1) - length, length);
}

// A call's arguments with query and key turned by turn(x, rows of the table). Borrows the rest.
class Turned {
 public:
  template <class Turn>
  Turned(const Attention& a, In table, Turn&& turn)
      : query_(turn(a.query, rows_of_queries(table, a.query))), key_(turn(a.key, table)), of_(a) {}
  Attention view() const { return of_.with_rows(query_, key_); }

 private:
  Tensor query_, key_;
  const Attention& of_;
};

// Gradients of turned rows become those of the rows.
template <class Turn>
Six turned_back(Six grads, In table, std::array<bool, 6> needed, Turn&& turn) {
  Tensor &query = std::get<0>(grads), &key = std::get<1>(grads);
  if (needed[0]) query = turn(query, rows_of_queries(table, query));
  if (needed[1]) key = turn(key, table);
  return grads;
}

inline auto turning(bool interleaved, bool inverse) {
  return [=](In x, In rows) { return rope().call(x, rows, interleaved, inverse); };
}

// On any device: both are turned, then forgotten.
inline Pair rotary_attention(const Attention& a, In table, bool interleaved) {
  return forward().call(Turned(a, table, turning(interleaved, /*inverse=*/false)).view());
}

// The gradients, by operators that have derivatives of their own.
inline Six rotary_gradients(const Attention& a, In table, bool interleaved, In out, In lse, Opt grad_out, Opt grad_lse,
                            std::array<bool, 6> needed) {
  const Turned turned(a, table, turning(interleaved, /*inverse=*/false));
  return turned_back(backward().call(turned.view(), out, lse, grad_out, grad_lse, needed), table, needed,
                     turning(interleaved, /*inverse=*/true));
}

}  // namespace attention_ops
