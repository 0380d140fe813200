// Sine and cosine of an angle in double, or of a vector of them: half a unit in the last place of 1.
#pragma once
#include <array>
#include <bit>
#include <cstdint>
#include <numbers>

#include "kernels/host_device.h"

namespace attention_ops {

template <class V>
struct SineCosine {
  V sine, cosine;
};

// The largest angle that is reduced here.
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

template <class V, size_t N>
HOST_DEVICE inline V evaluate_series(const std::array<double, N>& terms, V x) {
  V sum = terms[0] * x + terms[1];
  for (size_t k = 2; k < N; ++k) sum = sum * x + terms[k];
  return sum;
}

// x = n pi / 2 + r with |r| <= pi / 4; n's lowest bits, an Int, say which quarter of the turn x lies in. To 1e-19:
// sin r = r + r^3 p(r^2), cos r = 1 - r^2 / 2 + r^4 q(r^2).
template <class Int, class V>
HOST_DEVICE inline SineCosine<V> sine_cosine_reduced(V x) {
  // pi / 2 in parts of 33 bits: a whole number of 20 bits times each of them is exact.
  constexpr std::array<double, 3> quarter_turn = {0x1.921fb544p0, 0x1.0b4611a6p-34, 0x1.3198a2e0p-69};
  constexpr std::array<double, 8> p = alternating_series<3, 8>(-1), q = alternating_series<4, 8>(1);
  constexpr double shifter = 0x1.8p52;  // rounds what it is added to
  const V shifted = x * (2 / std::numbers::pi) + shifter, n = shifted - shifter;
  V r = x;
  for (const double part : quarter_turn) r = r - n * part;
  const V r2 = r * r;
  const V sine = r * r2 * evaluate_series(p, r2) + r, cosine = r2 * r2 * evaluate_series(q, r2) + (1.0 - 0.5 * r2);
  const Int quarter = std::bit_cast<Int>(shifted), swapped = -(quarter & 1);
  const auto with_sign = [](V y, Int negative) {
    return std::bit_cast<V>(std::bit_cast<Int>(y) ^ ((negative & 2) << 62));
  };
  return {with_sign(swapped ? cosine : sine, quarter), with_sign(swapped ? sine : cosine, quarter + 1)};
}

}  // namespace attention_ops
