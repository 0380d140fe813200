// Rotary positions: pairs of a row's elements turn by angles that grow with the row's position.
//   t = position * inv_freq        (a, b) -> factor (a cos t - b sin t, b cos t + a sin t)
// First a table of the positions' cosines and sines, then the rows of all heads.
#pragma once
#include "kernels/cpu/angles.h"
#include "kernels/cpu/rows.h"

namespace attention_ops {

struct RopeTableProblem {
  Index batch, axes, length, pairs;
  const double* positions;  // [batch, axes, length]
  const double* inv_freq;   // [pairs]
  const int64_t* axis_of;   // [pairs]; null: all on the first axis
  double factor;
};

// table [batch, length, 2, pairs]: cosines, then sines, both times the factor
template <class T>
class RopeTable {
 public:
  static constexpr Index kRows = 16;  // of a task

  RopeTable(const RopeTableProblem& problem, T* table) : p_(problem), table_(table) {}

  Index tasks() const { return (rows() + kRows - 1) / kRows; }
  double operations() const { return 16.0 * rows() * p_.pairs; }
  void run(Index task) const {
    for (Index row = task * kRows; row < std::min((task + 1) * kRows, rows()); ++row) make_row(row);
  }

 private:
  Index rows() const { return p_.batch * p_.length; }

  void make_row(Index row) const {
    T* cosines = table_ + row * 2 * p_.pairs;
    const double* position = p_.positions + row / p_.length * p_.axes * p_.length + row % p_.length;
    const Vec<double> factor = splat(p_.factor);
    each_piece<double>(p_.pairs, [&](Index i, int n) {
      const Vec<double> inv_freq = read_elements<double>(p_.inv_freq + i, 1, n);
      const SineCosine<Vec<double>> turn = sine_cosine(positions_of(position, i, n) * inv_freq);
      write(cosines + i, turn.cosine * factor, n), write(cosines + p_.pairs + i, turn.sine * factor, n);
    });
  }
  Vec<double> positions_of(const double* position, Index i, int n) const {
    if (!p_.axis_of) return splat(*position);
    Vec<double> lanes{};
    for (int k = 0; k < n; ++k) lanes[k] = position[p_.axis_of[i + k] * p_.length];
    return lanes;
  }
  static void write(T* to, Vec<double> x, int n) {
    T lanes[kLanes<double>];
    for (int k = 0; k < kLanes<double>; ++k) lanes[k] = T(x[k]);
    std::memcpy(to, lanes, n * sizeof *to);
  }

  const RopeTableProblem p_;
  T* table_;
};

struct RopeProblem {
  Index batch, heads, length, width;           // of x
  Index pairs;                                 // the first 2 * pairs elements of a row turn, the others pass
  Index table_batch_stride, table_row_stride;  // the batch's is 0 where all share one
  bool interleaved, inverse;                   // (0, 1), (2, 3), ... or (0, pairs), (1, pairs + 1), ...
};

// [B, H, L, D]
template <class E>
struct RopeView {
  E* data;
  Index strides[4];

  E* row(Index b, Index h, Index l) const { return data + b * strides[0] + h * strides[1] + l * strides[2]; }
};

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

template <class E>
class Rope {
 public:
  using T = Wide<E>;
  static constexpr Index kRows = 16;  // of a task

  Rope(const RopeProblem& problem, const T* table, RopeView<const E> x, RopeView<E> out)
      : p_(problem), table_(table), x_(x), out_(out) {
    for (int i = 0; i < kLanes<T>; ++i) {
      sign_[i] = problem.inverse ? T(-1) : T(1);
      alternating_[i] = i % 2 ? sign_[i] : -sign_[i];
    }
  }

  Index tasks() const { return p_.batch * blocks(); }
  double operations() const { return 4.0 * p_.batch * p_.heads * p_.length * p_.width; }
  void run(Index task) const {
    const Index b = task / blocks(), first = task % blocks() * kRows;
    for (Index l = first; l < std::min(first + kRows, p_.length); ++l) {
      const T* cosines = table_ + b * p_.table_batch_stride + l * p_.table_row_stride;
      for (Index h = 0; h < p_.heads; ++h) turn_row(out_.row(b, h, l), x_.row(b, h, l), cosines);
    }
  }

 private:
  Index blocks() const { return (p_.length + kRows - 1) / kRows; }

  void turn_row(E* out, const E* x, const T* cosines) const {
    const Index step = x_.strides[3];
    step == 1 ? turn_row(out, x, cosines, [](const E* from, int n) { return read(from, n); })
              : turn_row(out, x, cosines, [=](const E* from, int n) { return read_elements<T>(from, step, n); });
    for (Index d = 2 * p_.pairs; d < p_.width; ++d) out[d] = x[d * step];
  }
  template <class Read>
  void turn_row(E* out, const E* x, const T* cosines, Read&& read_x) const {
    const Index step = x_.strides[3], pairs = p_.pairs;
    const T* sines = cosines + pairs;
    if (p_.interleaved)
      each_piece<T>(pairs, [&](Index pair, int n) {
        const Vec<T> cosine = read(cosines + pair, n), sine = read(sines + pair, n);
        for (int first = 0; first < 2 * n; first += kLanes<T>) {
          const Index d = 2 * pair + first;
          const int count = std::min(kLanes<T>, 2 * n - first);
          const Vec<T> own = read_x(x + d * step, count), sines_of_both = twice(sine, first) * alternating_;
          write(out + d, fma(own, twice(cosine, first), uncontracted(swap_neighbours(own) * sines_of_both)), count);
        }
      });
    else
      each_piece<T>(pairs, [&](Index d, int n) {
        const Vec<T> a = read_x(x + d * step, n), b = read_x(x + (pairs + d) * step, n);
        const Vec<T> cosine = read(cosines + d, n), sine = read(sines + d, n) * sign_;
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

  const RopeProblem p_;
  const T* table_;
  const RopeView<const E> x_;
  const RopeView<E> out_;
  Vec<T> sign_, alternating_;  // of the sines, for a pair and for its two elements
};

}  // namespace attention_ops
