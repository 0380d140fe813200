// What the machine can do, to set beside a measurement: multiply-adds from registers, and plain reading of memory.
// Compiled by harness.py with the flags of one instruction set; WIDTH is the bytes of its vectors.
#include <stddef.h>
#include <time.h>

typedef float Vector __attribute__((vector_size(WIDTH), aligned(4)));
enum { kLanes = WIDTH / 4, kChains = WIDTH == 64 ? 24 : 12, kRepeats = 512 };

static volatile float sink;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// GFLOP/s of independent chains x := a x + b, for about so many seconds.
double probe_multiply_add(double seconds) {
  Vector x[kChains], a, b;
  for (int i = 0; i < kLanes; ++i) a[i] = 0.999f, b[i] = 0.001f;
  for (int c = 0; c < kChains; ++c) x[c] = b * (float)c;
  const double begin = now();
  double end = begin, flops = 0;
  while (end - begin < seconds) {
    for (int r = 0; r < kRepeats; ++r)
#pragma GCC unroll 32
      for (int c = 0; c < kChains; ++c) x[c] = a * x[c] + b;
    flops += 2.0 * kRepeats * kChains * kLanes;
    end = now();
  }
  for (int c = 0; c < kChains; ++c) sink = x[c][0];
  return flops / (end - begin) * 1e-9;
}

// GB/s of summing `floats` numbers once, several streams at a time.
double probe_read(const float* data, size_t floats) {
  enum { kStreams = 8 };
  const size_t step = kLanes, part = floats / kStreams / step * step;
  Vector sum[kStreams] = {{0}};
  const double begin = now();
  for (size_t i = 0; i < part; i += step)
#pragma GCC unroll 8
    for (int s = 0; s < kStreams; ++s) {
      __builtin_prefetch(data + s * part + i + 1024);
      sum[s] += *(const Vector*)(data + s * part + i);
    }
  const double end = now();
  for (int s = 0; s < kStreams; ++s) sink = sum[s][0];
  return (double)(kStreams * part * sizeof(float)) / (end - begin) * 1e-9;
}
