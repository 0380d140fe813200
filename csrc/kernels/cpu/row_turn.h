// The rotation of one row of a tensor by a table of cosines and sines (rope.h).
#pragma once
#include <array>

#include "kernels/cpu/rows.h"

namespace attention_ops {

// By the table [batch or 1, L, 2, pairs], cosines before sines: the first 2 * pairs elements of a row turn, the others
// pass. Pairs are (0, 1), (2, 3), ... where interleaved, else (0, pairs), (1, pairs + 1), ...
template <class T>
struct RowTurn {
  const T* table = nullptr;
  Index batch_stride = 0, row_stride = 0, pairs = 0;  // the batch's is 0 where all share one
  bool interleaved = false, inverse = false;

  bool defined() const { return table; }
  // Row l of batch b of x, whose elements are `step` apart. Those of out are next to each other; where those of x are
  // too, it may be x.
  template <class E>
  void operator()(E* out, const E* x, Index step, Index width, Index b, Index l) const {
    const T* cosines = table + b * batch_stride + l * row_stride;
    // Each with a step known when compiled, or not.
    step == 1 ? turn(out, x, std::integral_constant<Index, 1>(), cosines) : turn(out, x, step, cosines);
    for (Index d = 2 * pairs; d < width; ++d) out[d] = x[d * step];
  }

 private:
  template <class E, class Step>
  void turn(E* out, const E* x, Step step, const T* cosines) const {
    const T* sines = cosines + pairs;
    const Vec<T> sign = splat(inverse ? T(-1) : T(1));
    if (interleaved)
      each_piece<T>(pairs, [&](Index pair, int n) {
        const Vec<T> cosine = read_elements<T>(cosines + pair, 1, n),
                     sine = read_elements<T>(sines + pair, 1, n) * sign;
        for (int first = 0; first < 2 * n; first += kLanes<T>) {
          const Index d = 2 * pair + first;
          const int count = std::min(kLanes<T>, 2 * n - first);
          const Vec<T> own = read_elements<T>(x + d * step, step, count),
                       sines_of_both = twice(sine, first) * load(kAlternating.data());
          write_elements(out + d, fma(own, twice(cosine, first), swap_neighbours(own) * sines_of_both), count);
        }
      });
    else
      each_piece<T>(pairs, [&](Index d, int n) {
        const Vec<T> a = read_elements<T>(x + d * step, step, n), b = read_elements<T>(x + (pairs + d) * step, step, n);
        const Vec<T> cosine = read_elements<T>(cosines + d, 1, n), sine = read_elements<T>(sines + d, 1, n) * sign;
        write_elements(out + d, fma(a, cosine, b * -sine), n);
        write_elements(out + pairs + d, fma(b, cosine, a * sine), n);
      });
  }
  // Each lane twice: the part of the result that begins with its lane `first`.
  static Vec<T> twice(Vec<T> x, int first) {
    Ints<T> from;
    for (int i = 0; i < kLanes<T>; ++i) from[i] = (first + i) / 2;
    return __builtin_shuffle(x, from);
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
