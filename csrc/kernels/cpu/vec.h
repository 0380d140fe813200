// The vector vocabulary: all that kernels say about the processor, with vec_pairs.h. No other file names an instruction
// set. A section gives the width, the register tiles and the few operations that the portable text cannot say well.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "kernels/view.h"

namespace attention_ops {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kRegisterRows = 4, kRegisterVectors = 4;  // accumulators of a product's register tile
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kRegisterRows = 4, kRegisterVectors = 3;
#elif defined(__ARM_NEON)
constexpr int kVectorBytes = 16;
constexpr int kRegisterRows = 4, kRegisterVectors = 4;  // taller ones, up to 8 x 3, spill under g++ 12
#else
constexpr int kVectorBytes = 16;
constexpr int kRegisterRows = 4, kRegisterVectors = 3;
#endif

// As long as it lives, numbers below the normal range are zero in this thread's arithmetic; every kernel runs so. A
// product of one costs as much as a hundred others on x86, and what is lost is smaller than the smallest normal number.
class FlushDenormals {
#if defined(__SSE2__)
 public:
  FlushDenormals() { _mm_setcsr(before_ | 0x8040); }  // operands and results
  ~FlushDenormals() { _mm_setcsr(before_); }
  FlushDenormals(const FlushDenormals&) = delete;

 private:
  const unsigned before_ = _mm_getcsr();
#endif
};

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
using Words = uint32_t __attribute__((vector_size(kVectorBytes)));
using LongWords = uint64_t __attribute__((vector_size(kVectorBytes)));

// The lower half of each lane times m, to 64 bits.
inline LongWords multiply_lower(LongWords x, uint32_t m) {
#if defined(__AVX512F__)
  return (LongWords)_mm512_maskz_mul_epu32(__mmask8(-1), (__m512i)x, _mm512_set1_epi64(m));
#elif defined(__AVX2__)
  return (LongWords)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(m));
#elif defined(__SSE2__)
  return (LongWords)_mm_mul_epu32((__m128i)x, _mm_set1_epi64x(m));
#elif defined(__ARM_NEON)
  return (LongWords)vmull_u32(vmovn_u64((uint64x2_t)x), vdup_n_u32(m));
#else
  return (x & 0xffffffff) * m;
#endif
}

template <class T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();

// a * b + c, rounded once where there is an instruction for it. Products and sums that are written apart stay apart
// (setup.py): which bits come out does not depend on what a compiler joins where.
template <class V>
inline V fma(V a, V b, V c) {
#if defined(__AVX2__) || defined(__ARM_NEON)
  if constexpr (std::is_floating_point_v<V>) return std::fma(a, b, c);
#endif
  return a * b + c;
}

// 0 in the lanes of finite numbers alone.
template <class V>
inline auto not_finite(V x) {
  return std::bit_cast<decltype(x == x)>(x - x);
}

// The larger, the smaller; b where either is NaN.
template <class V>
inline V max(V a, V b) {
  return a > b ? a : b;
}
template <class V>
inline V min(V a, V b) {
  return a < b ? a : b;
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

// x - floor(x) and mantissa * 2^floor(x), for sections that have both as instructions.
template <class T>
constexpr bool kFloors = false;
template <class T>
Vec<T> fraction(Vec<T> x);
template <class T>
Vec<T> scale_by_floor(Vec<T> mantissa, Vec<T> x);

// Into the outer caches, or into the first one too; any address will do. The empty statement is an effect: g++ drops
// the calls of a function that has none, and a prefetch does not count.
constexpr int kLine = 64;  // bytes of a cache line
template <bool ToFirst = false>
inline void prefetch(const void* p) {
  __builtin_prefetch(p, /*write=*/0, /*locality=*/ToFirst ? 3 : 2);
  asm volatile("");
}
template <bool ToFirst = false>
inline void prefetch_row(const void* p, Index bytes) {
  for (Index byte = 0; byte < bytes; byte += kLine) prefetch<ToFirst>(static_cast<const char*>(p) + byte);
}

// Past the caches, to a multiple of the vector's size: for more than they hold, of which whole lines are written. Other
// threads may read it after end_streams().
template <class V>
inline void stream(void* p, V x) {
#if defined(__AVX512F__)
  if constexpr (sizeof x == 64) return _mm512_stream_si512(static_cast<__m512i*>(p), (__m512i)x);
#endif
#if defined(__AVX__)
  if constexpr (sizeof x == 32) return _mm256_stream_si256(static_cast<__m256i*>(p), (__m256i)x);
#endif
#if defined(__SSE2__)
  if constexpr (sizeof x == 16) return _mm_stream_si128(static_cast<__m128i*>(p), (__m128i)x);
#endif
  std::memcpy(p, &x, sizeof x);
}
inline void end_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
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

// What an element is computed in, and how many vectors of that a vector's worth of memory fills.
template <class E>
using Wide = std::conditional_t<sizeof(E) == 2, float, E>;
template <class E>
constexpr int kWidening = sizeof(Wide<E>) / sizeof(E);
template <class E>
constexpr int kElements = kVectorBytes / int(sizeof(E));

// Which element load_widened puts in lane `lane` of all its vectors in a row: where a pair of elements is a lane's
// bits, two operations split it without moving any across lanes.
template <class E>
constexpr int element_in(int lane) {
  return std::is_same_v<E, BFloat16> ? lane % kLanes<float> * 2 + lane / kLanes<float> : lane;
}

// A vector's worth of elements in the type that they are computed in.
inline void load_widened(Vec<float> (&x)[1], const float* p) {
  x[0] = load(p);
}
inline void load_widened(Vec<double> (&x)[1], const double* p) {
  x[0] = load(p);
}
inline void load_widened(Vec<float> (&x)[2], const BFloat16* p) {
  Ints<float> pairs;
  std::memcpy(&pairs, p, sizeof pairs);
  x[0] = std::bit_cast<Vec<float>>(pairs << 16);
  x[1] = std::bit_cast<Vec<float>>(pairs & int32_t(0xffff0000));
}
inline void load_widened(Vec<float> (&x)[2], const Float16* p) {
  for (int n = 0; n < 2; ++n, p += kLanes<float>)
#if defined(__AVX512F__)
    x[n] = _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
    x[n] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    x[n] = Vec<float>{p[0], p[1], p[2], p[3]};
#endif
}

template <class T>
inline T sum_lanes(Vec<T> x) {
  T sum = 0;
  for (int i = 0; i < kLanes<T>; ++i) sum += x[i];
  return sum;
}

// Sums of neighbours: those of a, then those of b.
template <class T>
inline Vec<T> add_neighbours(Vec<T> a, Vec<T> b) {
  Ints<T> even, odd;
  for (int i = 0; i < kLanes<T>; ++i) even[i] = 2 * i, odd[i] = 2 * i + 1;
  return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
}

// Sums of groups of N neighbours: those of x[0], then those of x[1], to x[N - 1].
template <class T, int N>
inline __attribute__((always_inline)) Vec<T> add_groups(Vec<T>* x) {
  if constexpr (N == 1) return x[0];
#pragma GCC unroll 16
  for (int n = 0; n < N / 2; ++n) x[n] = add_neighbours<T>(x[2 * n], x[2 * n + 1]);
  return add_groups<T, std::max(1, N / 2)>(x);
}

// A group of N elements over and over.
template <class T, int N>
inline Vec<T> repeat(const T* p) {
  constexpr int kBytes = N * int(sizeof(T));
  if constexpr (N == 1) return splat(*p);
  if constexpr (kBytes == kVectorBytes) return load(p);
  if constexpr (kBytes == 8) {
    int64_t bits;
    std::memcpy(&bits, p, sizeof bits);
    return std::bit_cast<Vec<T>>(Ints<double>{} + bits);
  }
#if defined(__AVX512F__)
  if constexpr (kBytes == 16)
    return std::bit_cast<Vec<T>>(_mm512_maskz_broadcast_f32x4(0xffff, _mm_loadu_ps(reinterpret_cast<const float*>(p))));
  return std::bit_cast<Vec<T>>(_mm512_maskz_broadcast_f64x4(0xff, _mm256_loadu_pd(reinterpret_cast<const double*>(p))));
#elif defined(__AVX2__)
  return std::bit_cast<Vec<T>>(_mm256_broadcast_ps(reinterpret_cast<const __m128*>(p)));
#endif
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

#if defined(__ARM_NEON)
inline bool any(Ints<float> x) {
  return vmaxvq_u32(std::bit_cast<uint32x4_t>(x)) != 0;
}
inline bool any(Ints<double> x) {
  return (x[0] | x[1]) != 0;
}
#else
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
#endif

#if defined(__AVX512F__)  // maskz: g++ 12 warns of its own header in the plain form
inline Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
  return _mm512_fmadd_ps(a, b, c);
}
inline Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
  return _mm512_fmadd_pd(a, b, c);
}
inline Vec<float> max(Vec<float> a, Vec<float> b) {
  return _mm512_maskz_max_ps(0xffff, a, b);
}
inline Vec<double> max(Vec<double> a, Vec<double> b) {
  return _mm512_maskz_max_pd(0xff, a, b);
}
// Below the normal range it is the flush of results that makes 0.
template <>
inline Vec<float> scale_by_power<float>(Vec<float> mantissa, Vec<float> n, Vec<float>, Vec<float>, float) {
  return _mm512_maskz_scalef_ps(0xffff, mantissa, n);
}
template <>
inline Vec<double> scale_by_power<double>(Vec<double> mantissa, Vec<double> n, Vec<double>, Vec<double>, double) {
  return _mm512_maskz_scalef_pd(0xff, mantissa, n);
}
template <>
inline constexpr bool kFloors<float> = true;
template <>
inline Vec<float> fraction<float>(Vec<float> x) {
  return _mm512_maskz_reduce_ps(0xffff, x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
template <>
inline Vec<float> scale_by_floor<float>(Vec<float> mantissa, Vec<float> x) {
  return _mm512_maskz_scalef_ps(0xffff, mantissa, x);
}
#elif defined(__AVX2__)
inline Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
  return _mm256_fmadd_ps(a, b, c);
}
inline Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
  return _mm256_fmadd_pd(a, b, c);
}
inline Vec<float> max(Vec<float> a, Vec<float> b) {
  return _mm256_max_ps(a, b);
}
inline Vec<double> max(Vec<double> a, Vec<double> b) {
  return _mm256_max_pd(a, b);
}
#elif defined(__ARM_NEON)
inline Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
  return vfmaq_f32(c, a, b);
}
inline Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
  return vfmaq_f64(c, a, b);
}
#endif

}  // namespace attention_ops
