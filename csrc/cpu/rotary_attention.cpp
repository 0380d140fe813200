// Attention of turned rows on the CPU: they lie in scratch memory, and gradients turn back in place.
#include <torch/library.h>

#include "cpu/rope.h"
#include "ops/ops.h"

namespace attention_ops {
namespace {

// The rows of the table that belong to the queries.
Tensor last_rows(In table, In query) {
  return table.narrow(1, table.size(1) - query.size(2), query.size(2));
}

// A call's arguments with query and key turned, in scratch memory.
class TurnedInScratch {
 public:
  TurnedInScratch(const Attention& a, In table, bool interleaved)
      : query_(scratch_rows(a.query, Place::query)), key_(scratch_rows(a.key, Place::key)), of_(a) {
    turn_rows(query_, a.query, last_rows(table, a.query), interleaved, /*inverse=*/false);
    turn_rows(key_, a.key, table, interleaved, false);
  }
  Attention view() const { return of_.with_rows(query_, key_); }

 private:
  Tensor query_, key_;
  const Attention& of_;
};

Pair rotary_forward_cpu(const Attention& a, In table, bool interleaved) {
  return forward().call(TurnedInScratch(a, table, interleaved).view());
}

Six rotary_backward_cpu(const Attention& a, In table, bool interleaved, In out, In lse, Opt grad_out, Opt grad_lse,
                        std::array<bool, 6> needed) {
  const Six grads =
      backward().call(TurnedInScratch(a, table, interleaved).view(), out, lse, grad_out, grad_lse, needed);
  const Tensor &query = std::get<0>(grads), &key = std::get<1>(grads);
  if (needed[0]) turn_rows(query, query, last_rows(table, query), interleaved, /*inverse=*/true);
  if (needed[1]) turn_rows(key, key, table, interleaved, true);
  return grads;
}

TORCH_LIBRARY_IMPL(attention_ops, CPU, m) {
  m.impl("_rotary_attention_forward", Flat<rotary_forward_cpu>::call);
  m.impl("_rotary_attention_backward", Flat<rotary_backward_cpu>::call);
}

}  // namespace
}  // namespace attention_ops
