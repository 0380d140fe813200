// Rotary positions: t = position * inv_freq, (a, b) -> factor (a cos t - b sin t, b cos t + a sin t). First a table
// of the positions' cosines and sines, then the rows of all heads; a warp takes a position, or a row.
#pragma once
#include "kernels/angles.h"
#include "kernels/cuda/site.cuh"

namespace attention_ops {

// Calls f(n) for the numbers below `count` that this warp takes.
template <class F>
DEVICE void each_of_warp(Index count, F&& f) {
  constexpr int kWarps = kSimtThreads / 32;
  for (Index n = device::block() * kWarps + device::thread() / 32; n < count; n += device::blocks() * kWarps) f(n);
}

DEVICE_APART SineCosine<double> sine_cosine(double x) {
  if (x <= kLargestReduced && x >= -kLargestReduced) return sine_cosine_reduced<int64_t>(x);
  return {device::sin(x), device::cos(x)};
}

template <class T>
__global__ void __launch_bounds__(kSimtThreads)
    simt_rope_table_kernel(const __grid_constant__ RopeTableProblem p, const __grid_constant__ RopeAxes axes) {
  const Index length = p.length;
  each_of_warp(p.batch * length, [&](Index n) {
    T* cosines = static_cast<T*>(p.table) + n * 2 * p.pairs;
    const double* positions = p.positions + n / length * p.axes * length + n % length;
    for (int k = device::thread() % 32; k < axes.count; k += 32) {
      const Index pair = axes.first + k;
      const SineCosine<double> turn =
          sine_cosine(device::load(positions + axes.axis[k] * length) * device::load(p.inv_freq + pair));
      device::store(cosines + pair, T(turn.cosine * p.factor));
      device::store(cosines + p.pairs + pair, T(turn.sine * p.factor));
    }
  });
}

// The pairs of one row, and what passes as it is. Products round as on the processor.
template <class T, class E>
DEVICE void turn_row(E* out, const E* x, Index step, const T* cosines, const RopeProblem& p) {
  const T* sines = cosines + p.pairs;
  for (Index i = device::thread() % 32; i < p.pairs; i += 32) {
    const Index first = p.interleaved ? 2 * i : i, second = p.interleaved ? 2 * i + 1 : i + p.pairs;
    const T a = convert<T>(device::load(x + first * step)), b = convert<T>(device::load(x + second * step));
    const T cosine = device::load(cosines + i), sine = p.inverse ? -device::load(sines + i) : device::load(sines + i);
    device::store(out + first, convert<E>(device::fma(a, cosine, -(b * sine))));
    device::store(out + second, convert<E>(device::fma(b, cosine, a * sine)));
  }
  for (Index d = 2 * p.pairs + device::thread() % 32; d < p.x.sizes[3]; d += 32)
    device::store(out + d, device::load(x + d * step));
}

template <class E>
__global__ void __launch_bounds__(kSimtThreads) simt_rope_kernel(const __grid_constant__ RopeProblem p) {
  using T = std::conditional_t<std::is_same_v<E, double>, double, float>;
  const Index heads = p.x.sizes[1], length = p.x.sizes[2];
  each_of_warp(p.x.sizes[0] * heads * length, [&](Index n) {
    const Index h = n % heads, l = n / heads % length, b = n / heads / length;
    const Index place = (p.table_batch == 1 ? 0 : b) * length + l;
    const E* x = static_cast<const E*>(p.x.data) + Rows(p.x, b, h, l).offset;
    E* out = static_cast<E*>(p.out.data) + Rows(p.out, b, h, l).offset;
    turn_row(out, x, p.x.strides[3], static_cast<const T*>(p.table) + place * 2 * p.pairs, p);
  });
}

}  // namespace attention_ops
