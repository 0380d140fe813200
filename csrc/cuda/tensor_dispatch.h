// Which of the compiled tensor-core kernels a problem takes.
#pragma once
#include <algorithm>

#include "kernels/cuda/problem.h"

namespace attention_ops {

template <class E, int Width, class F>
void with_extra(const Problem& p, F&& f) {
  if (p.softcap > 0 || p.adds() || p.sinks || p.dropout.on() || float(p.scale) <= 0)
    f.template operator()<E, Width, true>();
  else
    f.template operator()<E, Width, false>();
}

template <class E, class F>
void with_width(const Problem& p, F&& f) {
  const Index width = std::max(p.width, p.value_width);
  if (width <= 64) return with_extra<E, 64>(p, f);
  if (width <= 128) return with_extra<E, 128>(p, f);
  with_extra<E, 256>(p, f);
}

// Calls f<E, Width, Extra>() for a problem of half types with rows of at most 256.
template <class F>
void with_tensor_kind(const Problem& p, F&& f) {
  p.q.element == Element::bfloat16 ? with_width<BFloat16>(p, f) : with_width<Float16>(p, f);
}

}  // namespace attention_ops
