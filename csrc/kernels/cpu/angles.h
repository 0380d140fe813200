// Sine and cosine of vectors of angles: half a unit in the last place of 1 for any finite angle.
#pragma once
#include <cmath>

#include "kernels/angles.h"
#include "kernels/cpu/vec.h"

namespace attention_ops {

inline SineCosine<Vec<double>> sine_cosine(Vec<double> x) {
  SineCosine<Vec<double>> result = sine_cosine_reduced<Ints<double>>(x);
  const Ints<double> reduced = (x <= splat(kLargestReduced)) & (x >= splat(-kLargestReduced));
  if (any(~reduced)) {
    for (int i = 0; i < kLanes<double>; ++i)
      if (!reduced[i]) result.sine[i] = std::sin(x[i]), result.cosine[i] = std::cos(x[i]);
  }
  return result;
}

}  // namespace attention_ops
