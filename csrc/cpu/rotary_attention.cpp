// Attention of turned rows on the CPU.
#include "ops/rotary_attention.h"

#include <torch/library.h>

#include "cpu/attention.h"

namespace attention_ops {
namespace {

// Whether rows are multiplied in their own type, so that kernels may turn them.
bool has_plain_rows(const Attention& a) {
  return in_row_types(a, [&]<class T, class E>() { return a.query.scalar_type() == kScalarType<E>; });
}

Tensor turned_in_scratch(In x, Place place, const Rotation& by) {
  const Tensor out = scratch_rows(x, place);
  turn_rows(out, x, by);
  return out;
}

// Keys, which every panel of queries reads, are turned once; queries by their panels where that can be.
Pair rotary_forward_cpu(const Attention& a, In table, bool interleaved) {
  const Tensor rows = rows_of_queries(table, a.query);
  const Rotation of_queries{&rows, interleaved}, of_keys{&table, interleaved};
  const Tensor key = turned_in_scratch(a.key, Place::key, of_keys);
  if (has_plain_rows(a) && !decodes(a)) return forward_of(a.with_rows(a.query, key), of_queries);
  return forward_of(a.with_rows(turned_in_scratch(a.query, Place::query, of_queries), key));
}

// Both are turned again; their gradients turn back where the kernel stores them, if it does so in their own type.
Six rotary_backward_cpu(const Attention& a, In table, bool interleaved, In out, In lse, Opt grad_out, Opt grad_lse,
                        std::array<bool, 6> needed) {
  const Tensor rows = rows_of_queries(table, a.query);
  const Tensor query = turned_in_scratch(a.query, Place::query, {&rows, interleaved});
  const Tensor key = turned_in_scratch(a.key, Place::key, {&table, interleaved});
  const Attention turned = a.with_rows(query, key);
  const auto back = [&](In by) { return Rotation{&by, interleaved, /*inverse=*/true}; };
  if (has_plain_rows(a)) return backward_of(turned, out, lse, grad_out, grad_lse, needed, back(rows), back(table));
  return turned_back(backward_of(turned, out, lse, grad_out, grad_lse, needed), table, needed, [&](In x, In by) {
    turn_rows(x, x, back(by));
    return x;
  });
}

TORCH_LIBRARY_IMPL(attention_ops, CPU, m) {
  m.impl("_rotary_attention_forward", Flat<rotary_forward_cpu>::call);
  m.impl("_rotary_attention_backward", Flat<rotary_backward_cpu>::call);
}

}  // namespace
}  // namespace attention_ops
