// The rotation of one row of a tensor by a table of cosines and sines (rope.h).
#pragma once
#include <array>

#include "kernels/cpu/rows.h"

namespace attention_ops {

// A loop over converted elements would not become vectors for half types.
inline Vec<float> widen(Halves x, BFloat16) {
  return std::bit_cast<Vec<float>>(__builtin_convertvector(x, Ints<float>) << 16);
}
inline Vec<float> widen(Halves x, Float16) {
  const Ints<float> bits = __builtin_convertvector(x, Ints<float>), magnitude = bits & 0x7fff;
  const Ints<float> normal = (magnitude << 13) + (magnitude < 0x7c00 ? Ints<float>{} + 0x38000000 : 0x70000000);
  const Vec<float> subnormal = __builtin_convertvector(magnitude, Vec<float>) * splat(0x1p-24f);
  const Ints<float> value = magnitude < 0x400 ? std::bit_cast<Ints<float>>(subnormal) : normal;
  return std::bit_cast<Vec<float>>(value | (bits & 0x8000) << 16);
}
inline Halves narrow(Vec<float> x, BFloat16) {
  return round_halves(x);
}
// Rounded to even; NaN stays one.
inline Halves narrow(Vec<float> x, Float16) {
  const Ints<float> bits = std::bit_cast<Ints<float>>(x), magnitude = bits & 0x7fffffff;
  const Ints<float> normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const Vec<float> shifted = std::bit_cast<Vec<float>>(magnitude) + splat(0.5f);  // rounds at a subnormal's last bit
  const Ints<float> subnormal = std::bit_cast<Ints<float>>(shifted) - 0x3f000000;
  const Ints<float> special = magnitude > 0x7f800000 ? Ints<float>{} + 0x7e00 : 0x7c00;
  const Ints<float> rounded = magnitude < 0x38800000 ? subnormal : magnitude < 0x477ff000 ? normal : special;
  return __builtin_convertvector(rounded | ((bits >> 16) & 0x8000), Halves);
}

// By the table [batch or 1, L, 2, pairs], cosines before sines: the first 2 * pairs elements of a row turn, the others
// pass. Pairs are (0, 1), (2, 3), ... where interleaved, else (0, pairs), (1, pairs + 1), ...
template <class T>
struct RowTurn {
  const T* table = nullptr;
  Index batch_stride = 0, row_stride = 0, pairs = 0;  // the batch's is 0 where all share one
  bool interleaved = false, inverse = false;

  bool defined() const { return table; }
  RowTurn from_row(Index first) const {
    RowTurn rest = *this;
    rest.table += first * row_stride;
    return rest;
  }
  // Row l of batch b, its elements `step` apart; `out` may be x.
  template <class E>
  void operator()(E* out, const E* x, Index step, Index width, Index b, Index l) const {
    const T* cosines = table + b * batch_stride + l * row_stride;
    step == 1 ? turn(out, x, step, cosines, [](const E* from, int n) { return read(from, n); })
              : turn(out, x, step, cosines, [=](const E* from, int n) { return read_elements<T>(from, step, n); });
    for (Index d = 2 * pairs; d < width; ++d) out[d] = x[d * step];
  }

 private:
  template <class E, class Read>
  void turn(E* out, const E* x, Index step, const T* cosines, Read&& read_x) const {
    const T* sines = cosines + pairs;
    const Vec<T> sign = splat(inverse ? T(-1) : T(1));
    if (interleaved)
      each_piece<T>(pairs, [&](Index pair, int n) {
        const Vec<T> cosine = read(cosines + pair, n), sine = read(sines + pair, n) * sign;
        for (int first = 0; first < 2 * n; first += kLanes<T>) {
          const Index d = 2 * pair + first;
          const int count = std::min(kLanes<T>, 2 * n - first);
          const Vec<T> own = read_x(x + d * step, count),
                       sines_of_both = twice(sine, first) * load(kAlternating.data());
          write(out + d, fma(own, twice(cosine, first), uncontracted(swap_neighbours(own) * sines_of_both)), count);
        }
      });
    else
      each_piece<T>(pairs, [&](Index d, int n) {
        const Vec<T> a = read_x(x + d * step, n), b = read_x(x + (pairs + d) * step, n);
        const Vec<T> cosine = read(cosines + d, n), sine = read(sines + d, n) * sign;
        write(out + d, fma(a, cosine, uncontracted(b * -sine)), n);
        write(out + pairs + d, fma(b, cosine, uncontracted(a * sine)), n);
      });
  }
  template <class U>
  static Vec<T> read(const U* from, int n) {
    if constexpr (std::is_same_v<U, T>)
      return n == kLanes<T> ? load(from) : load_part(from, n);
    else {
      Halves x{};
      std::memcpy(&x, from, n * sizeof *from);
      return widen(x, U());
    }
  }
  // Each lane twice: the part of the result that begins with its lane `first`.
  static Vec<T> twice(Vec<T> x, int first) {
    Ints<T> from;
    for (int i = 0; i < kLanes<T>; ++i) from[i] = (first + i) / 2;
    return __builtin_shuffle(x, from);
  }
  template <class E>
  static void write(E* to, Vec<T> x, int n) {
    if constexpr (std::is_same_v<E, T>)
      n == kLanes<T> ? store(to, x) : store_part(to, x, n);
    else {
      const Halves halves = narrow(x, E());
      std::memcpy(to, &halves, n * sizeof *to);
    }
  }
  static Vec<T> swap_neighbours(Vec<T> x) {
    Ints<T> from;
    for (int i = 0; i < kLanes<T>; ++i) from[i] = i ^ 1;
    return __builtin_shuffle(x, from);
  }

  alignas(kVectorBytes) static constexpr std::array<T, kLanes<T>> kAlternating = [] {
    std::array<T, kLanes<T>> signs{};
    for (int i = 0; i < kLanes<T>; ++i) signs[i] = T(i % 2 ? 1 : -1);
    return signs;
  }();
};

}  // namespace attention_ops
