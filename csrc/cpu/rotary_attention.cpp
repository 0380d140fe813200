// Attention of turned rows on the CPU: they lie in scratch memory, and gradients turn back in place.
#include <torch/library.h>

#include <utility>

#include "cpu/rope.h"
#include "ops/rotary_attention.h"

namespace attention_ops {
namespace {

// Query and key turned into scratch memory.
Turned turned_in_scratch(const Attention& a, In table, bool interleaved) {
  return {a, table, [&, place = Place::query](In x, In rows) mutable {
            const Tensor out = scratch_rows(x, std::exchange(place, Place::key));
            turn_rows(out, x, rows, interleaved, /*inverse=*/false);
            return out;
          }};
}

Pair rotary_forward_cpu(const Attention& a, In table, bool interleaved) {
  return forward().call(turned_in_scratch(a, table, interleaved).view());
}

Six rotary_backward_cpu(const Attention& a, In table, bool interleaved, In out, In lse, Opt grad_out, Opt grad_lse,
                        std::array<bool, 6> needed) {
  const Turned turned = turned_in_scratch(a, table, interleaved);
  return turned_back(backward().call(turned.view(), out, lse, grad_out, grad_lse, needed), table, needed,
                     [&](In x, In rows) {
                       turn_rows(x, x, rows, interleaved, /*inverse=*/true);
                       return x;
                     });
}

TORCH_LIBRARY_IMPL(attention_ops, CPU, m) {
  m.impl("_rotary_attention_forward", Flat<rotary_forward_cpu>::call);
  m.impl("_rotary_attention_backward", Flat<rotary_backward_cpu>::call);
}

}  // namespace
}  // namespace attention_ops
