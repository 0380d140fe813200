// The vector vocabulary: all that kernels say about the processor. The only file that names an instruction set.
// A section gives the width, the register tiles and the few operations that the portable text below cannot say well.
#pragma once
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "kernels/view.h"

namespace attention_ops {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kForwardRows = 4, kForwardVectors = 4;    // accumulators of the forward kernels' register tile
constexpr int kBackwardRows = 8, kBackwardVectors = 2;  // the same for the backward kernels
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kForwardRows = 4, kForwardVectors = 3;
constexpr int kBackwardRows = 4, kBackwardVectors = 3;
#else
constexpr int kVectorBytes = 16;
constexpr int kForwardRows = 4, kForwardVectors = 3;
constexpr int kBackwardRows = 4, kBackwardVectors = 3;
#endif

template <class T>
struct VectorOf {
  using Int = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;
  typedef T type __attribute__((vector_size(kVectorBytes)));
  typedef Int ints __attribute__((vector_size(kVectorBytes)));
};

template <class T>
using Vec = typename VectorOf<T>::type;
template <class T>
using Ints = typename VectorOf<T>::ints;  // lanes of a comparison: -1 or 0
template <class T>
using LaneInt = typename VectorOf<T>::Int;
template <class T>
constexpr int kLanes = kVectorBytes / int(sizeof(T));

template <class T>
inline Vec<T> load(const T* p) {
  Vec<T> x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
template <class T>
inline void store(T* p, std::type_identity_t<Vec<T>> x) {
  std::memcpy(p, &x, sizeof x);
}
template <class T>
inline Ints<T> load_lanes(const LaneInt<T>* p) {
  Ints<T> x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
template <class T>
inline void store_lanes(LaneInt<T>* p, Ints<T> x) {
  std::memcpy(p, &x, sizeof x);
}
template <class T>
inline Vec<T> splat(T x) {
  return x - Vec<T>{};
}
template <class T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();

// a * b + c, contracted to one instruction where there is one.
template <class V>
inline V fma(V a, V b, V c) {
  return a * b + c;
}

// The larger; b where either is NaN.
template <class V>
inline V max(V a, V b) {
  return a > b ? a : b;
}

// mantissa * 2^n for whole n, and 0 where x < low. NaN goes through whatever its bits; beyond the range of normal
// numbers the power saturates. `shifted` is n plus 1.5 * 2^(bits of the fraction): n stands in its lowest bits.
template <class T>
inline Vec<T> scale_by_power(Vec<T> mantissa, Vec<T>, Vec<T> shifted, Vec<T> x, T low) {
  constexpr int kFraction = std::numeric_limits<T>::digits - 1;
  const Ints<T> one = std::bit_cast<Ints<T>>(splat(T(1)));
  const Vec<T> top = splat(T(std::numeric_limits<T>::max_exponent - 1));
  const Vec<T> power = std::bit_cast<Vec<T>>((std::bit_cast<Ints<T>>(shifted) << kFraction) + one);
  const Vec<T> y = mantissa * (x > top ? splat(std::numeric_limits<T>::max()) : power);
  return x < splat(low) ? Vec<T>{} : y;
}

// Only the first n elements are read or written; the other lanes are zero.
template <class T>
inline Vec<T> load_part(const T* p, int n) {
  T lanes[kLanes<T>]{};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}
template <class T>
inline void store_part(T* p, std::type_identity_t<Vec<T>> x, int n) {
  for (int i = 0; i < n; ++i) p[i] = x[i];
}

// What an element is computed in.
template <class E>
using Wide = std::conditional_t<sizeof(E) == 2, float, E>;

// The integers of as many 16-bit elements as a vector has lanes.
inline Ints<float> load_bits(const void* p) {
  typedef uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));
  Halves bits;
  std::memcpy(&bits, p, sizeof bits);
  return __builtin_convertvector(bits, Ints<float>);
}

// Elements in the type that they are computed in; Float16 as its own conversion does.
template <class E>
inline Vec<Wide<E>> load_widened(const E* p) {
  if constexpr (std::is_same_v<E, BFloat16>) {
    return std::bit_cast<Vec<float>>(load_bits(p) << 16);
  } else if constexpr (std::is_same_v<E, Float16>) {
#if defined(__AVX512F__)
    return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    const Ints<float> bits = load_bits(p), magnitude = (bits & 0x7fff) << 13;
    const Ints<float> scaled = std::bit_cast<Ints<float>>(std::bit_cast<Vec<float>>(magnitude) * 0x1p112f);
    return std::bit_cast<Vec<float>>((bits & 0x8000) << 16 |
                                     ((bits & 0x7c00) == 0x7c00 ? magnitude | 0x7f800000 : scaled));
#endif
  } else {
    return load(p);
  }
}
template <class E>
inline Vec<Wide<E>> load_widened_part(const E* p, int n) {
  E lanes[kLanes<Wide<E>>]{};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return load_widened(lanes);
}

template <class T>
inline T sum_lanes(Vec<T> x) {
  T sum = 0;
  for (int i = 0; i < kLanes<T>; ++i) sum += x[i];
  return sum;
}

// Halves of a and b that add up to neighbours' sums: of each `Domain` lanes, units of `Unit` lanes, every second one of
// a, then of b.
template <class T, int Domain, int Unit>
inline Vec<T> add_neighbours(Vec<T> a, Vec<T> b) {
  constexpr int kUnits = Domain / Unit;
  Ints<T> even, odd;
  for (int i = 0; i < kLanes<T>; ++i) {
    const int unit = i % Domain / Unit, from = (unit < kUnits / 2 ? 0 : kLanes<T>)+i / Domain * Domain;
    even[i] = from + 2 * unit % kUnits * Unit + i % Unit;
    odd[i] = even[i] + Unit;
  }
  return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
}

// Lane i is the sum of rows[i]; in the 16 bytes that a processor shuffles cheaply first.
template <class T, int N = kLanes<T>>
inline __attribute__((always_inline)) Vec<T> sum_each(Vec<T> (&rows)[kLanes<T>]) {
  if constexpr (N == 1) return rows[0];
  else {
    constexpr int kGroup = 16 / int(sizeof(T));
    constexpr bool kInGroup = kLanes<T> / N < kGroup;
#pragma GCC unroll 16
    for (int n = 0; n < N / 2; ++n)
      rows[n] = add_neighbours<T, kInGroup ? kGroup : kLanes<T>, kInGroup ? 1 : kGroup>(rows[2 * n], rows[2 * n + 1]);
    return sum_each<T, N / 2>(rows);
  }
}

// x[i - n]; the last n lanes come first.
template <class T>
inline Vec<T> rotate(Vec<T> x, int n) {
  Ints<T> from;
  for (int i = 0; i < kLanes<T>; ++i) from[i] = (i + kLanes<T> - n) % kLanes<T>;
  return __builtin_shuffle(x, from);
}

// rows[r][c] becomes rows[c][r], in log2(lanes) rounds of exchanges.
template <class T, int Step = 1>
inline __attribute__((always_inline)) void transpose(Vec<T> (&rows)[kLanes<T>]) {
  if constexpr (Step < kLanes<T>) {
    Ints<T> low, high;
    for (int i = 0; i < kLanes<T>; ++i) {
      low[i] = i & Step ? kLanes<T> + (i ^ Step) : i;
      high[i] = i & Step ? kLanes<T> + i : i ^ Step;
    }
#pragma GCC unroll 16
    for (int r = 0; r < kLanes<T>; ++r) {
      if (r & Step) continue;
      const Vec<T> a = rows[r], b = rows[r | Step];
      rows[r] = __builtin_shuffle(a, b, low);
      rows[r | Step] = __builtin_shuffle(a, b, high);
    }
    transpose<T, Step * 2>(rows);
  }
}

inline bool any(Ints<float> x) {
  for (int n = 0; n < kLanes<float>; ++n)
    if (x[n]) return true;
  return false;
}
inline bool any(Ints<double> x) {
  for (int n = 0; n < kLanes<double>; ++n)
    if (x[n]) return true;
  return false;
}

#if defined(__AVX512F__)  // maskz: g++ 12 warns of its own header in the plain form
inline Vec<float> max(Vec<float> a, Vec<float> b) {
  return _mm512_maskz_max_ps(0xffff, a, b);
}
inline Vec<double> max(Vec<double> a, Vec<double> b) {
  return _mm512_maskz_max_pd(0xff, a, b);
}
template <>
inline Vec<float> scale_by_power<float>(Vec<float> mantissa, Vec<float> n, Vec<float>, Vec<float> x, float low) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, splat(low), _CMP_NLT_UQ), mantissa, n);
}
template <>
inline Vec<double> scale_by_power<double>(Vec<double> mantissa, Vec<double> n, Vec<double>, Vec<double> x, double low) {
  return _mm512_maskz_scalef_pd(_mm512_cmp_pd_mask(x, splat(low), _CMP_NLT_UQ), mantissa, n);
}
#elif defined(__AVX2__)
inline Vec<float> max(Vec<float> a, Vec<float> b) {
  return _mm256_max_ps(a, b);
}
inline Vec<double> max(Vec<double> a, Vec<double> b) {
  return _mm256_max_pd(a, b);
}
#endif

}  // namespace attention_ops
