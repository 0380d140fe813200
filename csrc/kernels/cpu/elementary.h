// Exponential and hyperbolic tangent on vectors. Scores live in units of log2, so the exponential is 2^x.
#pragma once
#include <array>
#include <numbers>

#include "kernels/cpu/vec.h"

namespace attention_ops {

template <class T>
constexpr T kLog2e = std::numbers::log2e_v<T>;
template <class T>
constexpr T kLn2 = std::numbers::ln2_v<T>;

// ln(2)^k / k! for k = 13 .. 1: (2^f - 1) / f to the last bit of a double for |f| <= 0.5.
constexpr std::array<double, 13> exp2_series() {
  std::array<double, 13> terms{};
  double term = 1;
  for (size_t k = 1; k <= terms.size(); ++k) terms[terms.size() - k] = term *= kLn2<double> / double(k);
  return terms;
}

template <class T>
struct Exp2Constants;

template <>
struct Exp2Constants<float> {
  // Minimax of (2^f - one) / f, two terms shorter than its series; `one` centres its error (2.1e-7 relative).
  static constexpr std::array<float, 5> fast = {1.327647217e-3f, 9.675541331e-3f, 5.550713273e-2f, 2.402211972e-1f,
                                                6.931469671e-1f};
  // Minimax of 2^f for 0 <= f < 1 (1.5e-7 relative).
  static constexpr std::array<float, 6> floored = {1.877576578e-3f, 8.989338763e-3f, 5.582631752e-2f,
                                                   2.401536256e-1f, 6.931530237e-1f, 9.999999404e-1f};
  // A term shorter, and exact at 0 (2.9e-6 relative, and so much at most in lse): for what products take rounded to
  // eight bits.
  static constexpr std::array<float, 5> short_floored = {1.342668427e-2f, 5.224247422e-2f, 2.412802048e-1f,
                                                         6.930448449e-1f, 1};
  static constexpr float one = 1.000000072f, shifter = 0x1.8p23f, low = -126;
};

template <>
struct Exp2Constants<double> {
  static constexpr std::array<double, 13> fast = exp2_series();
  static constexpr double one = 1, shifter = 0x1.8p52, low = -1022;
};

// 2^x = (1 + slope f) 2^n with x = n + f; adding the shifter rounds x to n.
template <class T>
struct Exp2Parts {
  Vec<T> n, shifted, f, slope;
};

template <class T, size_t N>
inline Vec<T> evaluate(const std::array<T, N>& polynomial, Vec<T> f) {
  Vec<T> r = splat(polynomial[0]);
  for (size_t k = 1; k < N; ++k) r = fma(r, f, splat(polynomial[k]));
  return r;
}

template <class T>
inline Exp2Parts<T> split_exp2(Vec<T> x) {
  const Vec<T> shifter = splat(Exp2Constants<T>::shifter), shifted = x + shifter, n = shifted - shifter, f = x - n;
  return {n, shifted, f, evaluate<T>(Exp2Constants<T>::fast, f)};
}

// 0 below the smallest normal number (where results are flushed), NaN through. E: the elements of the products that it
// is for.
template <class T, class E = T>
inline Vec<T> exp2(Vec<T> x) {
  using C = Exp2Constants<T>;
  if constexpr (kFloors<T> && std::is_same_v<E, BFloat16>)
    return scale_by_floor<T>(evaluate<T>(C::short_floored, fraction<T>(x)), x);
  else if constexpr (kFloors<T>)
    return scale_by_floor<T>(evaluate<T>(C::floored, fraction<T>(x)), x);
  const Exp2Parts<T> parts = split_exp2<T>(x);
  return scale_by_power<T>(fma(parts.slope, parts.f, splat(C::one)), parts.n, parts.shifted, x, C::low);
}

// 2^(from - to), for sums that move from one maximum to another; exactly 1 where it stays, or errors would add up.
template <class T>
inline Vec<T> rescale(Vec<T> from, Vec<T> to) {
  return from == to ? splat(T(1)) : exp2<T>(from - to);
}

// Of positive normal numbers, infinity and NaN: x = 2^n y with y around 1, log y = 2 atanh((y - 1) / (y + 1)).
template <class T>
inline Vec<T> log2(Vec<T> x) {
  constexpr int kFraction = std::numeric_limits<T>::digits - 1, kTerms = sizeof(T) == 4 ? 5 : 11;
  const Ints<T> bits = std::bit_cast<Ints<T>>(x);
  const Ints<T> n = (bits - std::bit_cast<Ints<T>>(splat(T(std::numbers::sqrt2 / 2)))) >> kFraction;
  const Vec<T> y = std::bit_cast<Vec<T>>(bits - (n << kFraction));
  const Vec<T> t = (y - splat(T(1))) / (y + splat(T(1))), t2 = t * t;
  Vec<T> sum = splat(T(1) / (2 * kTerms - 1));
  for (int k = kTerms - 2; k >= 0; --k) sum = fma(sum, t2, splat(T(1) / (2 * k + 1)));
  const Vec<T> log = fma(t * sum, splat(2 * kLog2e<T>), __builtin_convertvector(n, Vec<T>));
  return x < splat(kInfinity<T>) ? log : x;
}

// Between -limit and limit; NaN through.
template <class T>
inline Vec<T> clamped(Vec<T> x, T limit) {
  return min(splat(limit), max(splat(-limit), x));
}

// tanh(x) = e / (e + 2) with e = exp(2x) - 1, which keeps small x exact.
inline Vec<double> tanh(Vec<double> x) {
  using T = double;
  const Vec<T> y = clamped<T>(x, 20) * splat(2 * kLog2e<T>);
  const Exp2Parts<T> parts = split_exp2<T>(y);
  const Vec<T> power = scale_by_power<T>(splat(T(1)), parts.n, parts.shifted, y, Exp2Constants<T>::low);
  const Vec<T> e = fma(power, parts.slope * parts.f, power - splat(T(1)));
  return e / (e + splat(T(2)));
}

// x P(x^2) / Q(x^2), minimax for |x| <= 9 (2.2e-8 relative, 3.2e-7 with its roundings); from there on it rounds to 1.
inline Vec<float> tanh(Vec<float> x) {
  static constexpr std::array<float, 5> P = {1.342412137e-8f, 2.066456182e-5f, 3.499200800e-3f, 1.338414997e-1f, 1};
  static constexpr std::array<float, 5> Q = {7.806552276e-7f, 3.291371395e-4f, 2.589098178e-2f, 4.671747088e-1f, 1};
  const Vec<float> x2 = min(splat(81.f), x * x);
  return clamped<float>(x * evaluate<float>(P, x2) / evaluate<float>(Q, x2), 1);
}

}  // namespace attention_ops
