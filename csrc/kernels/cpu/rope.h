// Rotary positions: pairs of a row's elements turn by angles that grow with the row's position.
//   t = position * inv_freq        (a, b) -> factor (a cos t - b sin t, b cos t + a sin t)
// First a table of the positions' cosines and sines, then the rows of all heads.
#pragma once
#include "kernels/cpu/angles.h"
#include "kernels/cpu/row_turn.h"

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
  Index batch, heads, length, width;  // of x
};

// [B, H, L, D]
template <class E>
struct RopeView {
  E* data;
  Index strides[4];

  E* row(Index b, Index h, Index l) const { return data + b * strides[0] + h * strides[1] + l * strides[2]; }
};

template <class E>
class Rope {
 public:
  static constexpr Index kRows = 16;  // of a task

  Rope(const RopeProblem& problem, const RowTurn<Wide<E>>& turn, RopeView<const E> x, RopeView<E> out)
      : p_(problem), turn_(turn), x_(x), out_(out) {}

  Index tasks() const { return p_.batch * blocks(); }
  double operations() const { return 4.0 * p_.batch * p_.heads * p_.length * p_.width; }
  void run(Index task) const {
    const Index b = task / blocks(), first = task % blocks() * kRows;
    for (Index l = first; l < std::min(first + kRows, p_.length); ++l)
      for (Index h = 0; h < p_.heads; ++h) turn_(out_.row(b, h, l), x_.row(b, h, l), x_.strides[3], p_.width, b, l);
  }

 private:
  Index blocks() const { return (p_.length + kRows - 1) / kRows; }

  const RopeProblem p_;
  const RowTurn<Wide<E>> turn_;
  const RopeView<const E> x_;
  const RopeView<E> out_;
};

}  // namespace attention_ops
