// Drives the rotation of rows over many small problems in exactly fitting memory, and checks it against its formula.
// Torch-free: built with the sanitizers by the Makefile beside it, once for each instruction set.
#include "kernels/cpu/rope.h"

#include <cstdio>
#include <cstdlib>

#include "arrays.h"

namespace attention_ops {
namespace {

struct Trial {
  RopeProblem problem{};
  RopeTableProblem places{};
  bool interleaved = draw(0, 1), inverse = draw(0, 1);
  Array<double> positions, inv_freq;
  Array<int64_t> axis_of;

  Trial() {
    RopeProblem& p = problem;
    p.batch = draw(1, 3), p.heads = draw(1, 3), p.length = draw(1, 20), places.pairs = draw(0, 40);
    p.width = 2 * places.pairs + draw(0, 3);
    places.axes = draw(1, 3), places.batch = draw(0, 1) ? p.batch : 1, places.factor = draw(1, 3);
    places.length = p.length;
    const Index pairs = places.pairs, count = places.batch * places.axes * p.length;
    positions = array_of<double>(count), inv_freq = array_of<double>(pairs), axis_of = array_of<int64_t>(pairs);
    for (Index i = 0; i < count; ++i) positions[i] = double(draw(0, 9) ? draw(-5000, 5000) : draw(0, 1) << 40);
    for (Index i = 0; i < pairs; ++i)
      inv_freq[i] = std::pow(1e4, -double(i) / pairs), axis_of[i] = draw(0, places.axes - 1);
    places.positions = positions.get(), places.inv_freq = inv_freq.get();
    if (draw(0, 1)) places.axis_of = axis_of.get();
  }

  template <class T>
  RowTurn<T> turn(const T* table) const {
    const Index row = 2 * places.pairs;
    return {table, places.batch == 1 ? 0 : places.length * row, row, places.pairs, interleaved, inverse};
  }
  double angle(Index b, Index l, Index i) const {
    const Index axis = places.axis_of ? axis_of[i] : 0, batch = places.batch == 1 ? 0 : b;
    return positions[(batch * places.axes + axis) * places.length + l] * inv_freq[i];
  }
};

// The first element of a row of `width`, in memory with heads next to each other or not, `step` between elements.
template <class E>
RopeView<E> view(E* data, const RopeProblem& p, bool heads_first, Index step) {
  const Index row = p.width * step, plane = heads_first ? p.length * row : row;
  return {data, {p.heads * p.length * row, plane, heads_first ? row : p.heads * row, step}};
}

template <class E>
bool is_right(E ours, double wanted, double size) {
  const double step = sizeof(E) == 8 ? 1e-14 : sizeof(E) == 4 ? 1e-6 : std::is_same_v<E, BFloat16> ? 0x1p-8 : 0x1p-11;
  return std::abs(double(convert<Wide<E>>(ours)) - wanted) <=
         step * (std::abs(wanted) + (sizeof(E) == 2 ? 1e-3 : size));
}

template <class E>
int run_trial() {
  const Trial trial;
  const RopeProblem& p = trial.problem;
  const Index pairs = trial.places.pairs, step = draw(1, 2), rows = p.batch * p.heads * p.length;
  const Array<E> x = normal<E>(rows * p.width * step), out = array_of<E>(rows * p.width);
  const RopeView<const E> from = view<const E>(x.get(), p, draw(0, 1), step);
  const RopeView<E> to = view<E>(out.get(), p, false, 1);
  const Array<Wide<E>> table = array_of<Wide<E>>(trial.places.batch * p.length * 2 * pairs);
  const RopeTable<Wide<E>> of_positions(trial.places, table.get());
  for (Index task = 0; task < of_positions.tasks(); ++task) of_positions.run(task);
  const Rope<E> kernel(p, trial.turn<Wide<E>>(table.get()), from, to);
  for (Index task = 0; task < kernel.tasks(); ++task) kernel.run(task);

  int wrong = 0;
  for (Index row = 0; row < rows; ++row) {
    const Index b = row / (p.heads * p.length), h = row / p.length % p.heads, l = row % p.length;
    const E *source = from.row(b, h, l), *result = to.row(b, h, l);
    for (Index i = 0; i < pairs; ++i) {
      const Index first = trial.interleaved ? 2 * i : i, second = trial.interleaved ? first + 1 : first + pairs;
      const double a = convert<Wide<E>>(source[first * step]), c = convert<Wide<E>>(source[second * step]);
      const double t = trial.inverse ? -trial.angle(b, l, i) : trial.angle(b, l, i);
      const double size = trial.places.factor * (std::abs(a) + std::abs(c));
      wrong += !is_right(result[first], trial.places.factor * (a * std::cos(t) - c * std::sin(t)), size);
      wrong += !is_right(result[second], trial.places.factor * (c * std::cos(t) + a * std::sin(t)), size);
    }
    for (Index d = 2 * pairs; d < p.width; ++d)
      wrong += convert<Wide<E>>(result[d]) != convert<Wide<E>>(source[d * step]);
  }
  return wrong;
}

}  // namespace
}  // namespace attention_ops

int main(int, char** arguments) {
  using namespace attention_ops;
  const int rounds = 10 * (arguments[1] ? std::atoi(arguments[1]) : 20);
  int wrong = 0;
  for (int round = 0; round < rounds; ++round)
    wrong += run_trial<float>() + run_trial<double>() + run_trial<BFloat16>() + run_trial<Float16>();
  std::printf("rope: %d-byte vectors, %d rounds: %d wrong\n", kVectorBytes, rounds, wrong);
  return wrong != 0;
}
