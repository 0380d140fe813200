// Rotary positions: pairs of a row's elements turn by angles that grow with the row's position.
//   t = position * inv_freq        (a, b) -> factor (a cos t - b sin t, b cos t + a sin t)
// First the tables of all positions, then the rows of all heads.
#pragma once
#include "kernels/cpu/angles.h"
#include "kernels/cpu/rows.h"

namespace attention_ops {

struct RopeProblem {
  Index batch, heads, length, width;  // of x
  Index pairs;                        // the first 2 * pairs elements of a row turn, the others pass
  Index position_batch, axes;         // positions [position_batch, axes, length]
  const double* positions;
  const double* inv_freq;     // [pairs]
  const int64_t* axis_of;     // [pairs]; null: all on the first axis
  bool interleaved, inverse;  // (0, 1), (2, 3), ... or (0, pairs), (1, pairs + 1), ...
  double factor;
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

  Rope(const RopeProblem& problem, RopeView<const E> x, RopeView<E> out) : p_(problem), x_(x), out_(out) {}

  Index table_size() const { return p_.position_batch * p_.length * 2 * span(); }

  Index table_tasks() const { return p_.position_batch * blocks(); }
  double table_operations() const { return 16.0 * p_.position_batch * p_.length * p_.pairs; }
  void make_table(T* tables, Index task) const {
    const Index b = task / blocks(), first = task % blocks() * kRows;
    for (Index l = first; l < std::min(first + kRows, p_.length); ++l) make_row(row_of(tables, b, l), b, l);
  }

  Index tasks() const { return p_.batch * blocks(); }
  double operations() const { return 4.0 * p_.batch * p_.heads * p_.length * p_.width; }
  void run(const T* tables, Index task) const {
    const Index b = task / blocks(), first = task % blocks() * kRows;
    for (Index l = first; l < std::min(first + kRows, p_.length); ++l) {
      const T* cosines = row_of(tables, p_.position_batch == 1 ? 0 : b, l);
      for (Index h = 0; h < p_.heads; ++h) turn_row(out_.row(b, h, l), x_.row(b, h, l), cosines);
    }
  }

 private:
  Index blocks() const { return (p_.length + kRows - 1) / kRows; }
  // For each position `span` cosines, then as many sines: those of the pairs or, where the elements of a pair are
  // neighbours, those of the elements, with the sine's sign.
  Index span() const { return p_.interleaved ? 2 * p_.pairs : p_.pairs; }
  template <class U>
  U* row_of(U* tables, Index b, Index l) const {
    return tables + (b * p_.length + l) * 2 * span();
  }

  void make_row(T* cosines, Index b, Index l) const {
    const double* position = p_.positions + b * p_.axes * p_.length + l;
    const Vec<double> factor = splat(p_.factor), sign = splat(p_.inverse ? -p_.factor : p_.factor);
    each_piece<double>(p_.pairs, [&](Index i, int n) {
      const Vec<double> inv_freq = read_elements<double>(p_.inv_freq + i, 1, n);
      const SineCosine<Vec<double>> turn = sine_cosine(positions_of(position, i, n) * inv_freq);
      double cosine[kLanes<double>], sine[kLanes<double>];
      store(cosine, turn.cosine * factor), store(sine, turn.sine * sign);
      for (int k = 0; k < n; ++k) put(cosines, i + k, T(cosine[k]), T(sine[k]));
    });
  }
  Vec<double> positions_of(const double* position, Index i, int n) const {
    if (!p_.axis_of) return splat(*position);
    Vec<double> lanes{};
    for (int k = 0; k < n; ++k) lanes[k] = position[p_.axis_of[i + k] * p_.length];
    return lanes;
  }
  void put(T* cosines, Index pair, T cosine, T sine) const {
    T* sines = cosines + span();
    if (!p_.interleaved) {
      cosines[pair] = cosine, sines[pair] = sine;
    } else {
      cosines[2 * pair] = cosines[2 * pair + 1] = cosine;
      sines[2 * pair] = -sine, sines[2 * pair + 1] = sine;
    }
  }

  void turn_row(E* out, const E* x, const T* cosines) const {
    const Index step = x_.strides[3];
    step == 1 ? turn_row(out, x, cosines, [](const E* from, int n) { return read(from, n); })
              : turn_row(out, x, cosines, [=](const E* from, int n) { return read_elements<T>(from, step, n); });
    for (Index d = 2 * p_.pairs; d < p_.width; ++d) out[d] = x[d * step];
  }
  template <class Read>
  void turn_row(E* out, const E* x, const T* cosines, Read&& read_x) const {
    const Index step = x_.strides[3], pairs = p_.pairs;
    const T* sines = cosines + span();
    if (p_.interleaved)
      each_piece<T>(2 * pairs, [&](Index d, int n) {
        const Vec<T> own = read_x(x + d * step, n), cosine = read(cosines + d, n), sine = read(sines + d, n);
        write(out + d, fma(own, cosine, uncontracted(swap_neighbours(own) * sine)), n);
      });
    else
      each_piece<T>(pairs, [&](Index d, int n) {
        const Vec<T> a = read_x(x + d * step, n), b = read_x(x + (pairs + d) * step, n);
        const Vec<T> cosine = read(cosines + d, n), sine = read(sines + d, n);
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
  const RopeView<const E> x_;
  const RopeView<E> out_;
};

}  // namespace attention_ops
