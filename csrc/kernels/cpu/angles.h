// Sine and cosine of vectors of angles, in double: half a unit in the last place of 1 for any finite angle.
#pragma once
#include <array>
#include <cmath>

#include "kernels/cpu/elementary.h"

namespace attention_ops {

struct SineCosine {
  Vec<double> sine, cosine;
};

// pi / 2 in parts of 33 bits: a whole number of 20 bits times each of them is exact.
inline constexpr std::array<double, 3> kQuarterTurn = {0x1.921fb544p0, 0x1.0b4611a6p-34, 0x1.3198a2e0p-69};
inline constexpr double kLargestReduced = 0x1p20 * 1.5;

// The Taylor series' terms sign / n!, sign changing, for n = First, First + 2, ..., the highest first.
template <int First, size_t N>
constexpr std::array<double, N> alternating_series(double sign) {
  std::array<double, N> terms{};
  double factorial = 1;
  for (int n = 2; n <= First; ++n) factorial *= n;
  for (size_t k = 0; k < N; ++k) {
    const double n = First + 2.0 * k;
    terms[N - 1 - k] = sign / factorial;
    factorial *= (n + 1) * (n + 2), sign = -sign;
  }
  return terms;
}

// Of |x| <= pi / 4, to 1e-19: sin x = x + x^3 p(x^2), cos x = 1 - x^2 / 2 + x^4 q(x^2).
inline constexpr std::array<double, 8> kSine = alternating_series<3, 8>(-1), kCosine = alternating_series<4, 8>(1);

// x = n pi / 2 + r; n's lowest bits say which quarter of the turn x lies in.
inline SineCosine sine_cosine_reduced(Vec<double> x) {
  const Vec<double> shifter = splat(Exp2Constants<double>::shifter);
  const Vec<double> shifted = x * splat(2 / std::numbers::pi) + shifter, n = shifted - shifter;
  Vec<double> r = x;
  for (const double part : kQuarterTurn) r = r - n * splat(part);
  const Vec<double> r2 = r * r;
  const Vec<double> sine = fma(r * r2, evaluate<double>(kSine, r2), r);
  const Vec<double> cosine = fma(r2 * r2, evaluate<double>(kCosine, r2), splat(1.0) - splat(0.5) * r2);
  const Ints<double> quarter = std::bit_cast<Ints<double>>(shifted), swapped = -(quarter & 1);
  const auto with_sign = [](Vec<double> y, Ints<double> negative) {
    return std::bit_cast<Vec<double>>(std::bit_cast<Ints<double>>(y) ^ ((negative & 2) << 62));
  };
  return {with_sign(swapped ? cosine : sine, quarter), with_sign(swapped ? sine : cosine, quarter + 1)};
}

inline SineCosine sine_cosine(Vec<double> x) {
  SineCosine result = sine_cosine_reduced(x);
  const Ints<double> reduced = (x <= splat(kLargestReduced)) & (x >= splat(-kLargestReduced));
  if (any(~reduced)) {
    for (int i = 0; i < kLanes<double>; ++i)
      if (!reduced[i]) result.sine[i] = std::sin(x[i]), result.cosine[i] = std::cos(x[i]);
  }
  return result;
}

}  // namespace attention_ops
