// The names of csrc/kernels/cuda/device.h on the processor: kernels that include it run under the model.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "kernels/view.h"
#include "model.h"

#define DEVICE inline
#define DEVICE_APART inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

namespace attention_ops::device {

using gpu_model::Line;

struct alignas(16) Chunk {
  uint32_t word[4];
};

using gpu_model::block;
using gpu_model::blocks;
using gpu_model::thread;

inline void sync_threads(Line line = Line::current()) {
  gpu_model::sync_threads(line);
}
inline void sync_warp(Line line = Line::current()) {
  gpu_model::sync_warp(line);
}
template <class V>
V shuffle_xor(V x, int mask, Line line = Line::current()) {
  uint64_t bits = 0;
  std::memcpy(&bits, &x, sizeof x);
  bits = gpu_model::shuffle_xor(bits, mask, line);
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline uint32_t ballot(bool x, Line line = Line::current()) {
  return gpu_model::ballot(x, line);
}
inline int first_bit(uint32_t bits) {
  return std::countr_zero(bits);
}

// An index that knows where it was written.
struct Position {
  int index;
  Line line;
  Position(int i, Line at = Line::current()) : index(i), line(at) {}
};

template <class E>
struct SharedElement {
  uint32_t address;
  Line line;
  operator E() const {
    E x;
    gpu_model::read_shared(address, &x, sizeof x, line);
    return x;
  }
  const SharedElement& operator=(E x) const {
    gpu_model::write_shared(address, &x, sizeof x, line);
    return *this;
  }
};

template <class E>
struct Shared {
  uint32_t first;
  SharedElement<E> operator[](Position i) const { return {first + uint32_t(i.index * sizeof(E)), i.line}; }
};
template <class E>
Shared<E> shared(int first_byte) {
  return {uint32_t(first_byte)};
}
inline uint32_t shared_address(int first_byte) {
  return uint32_t(first_byte);
}

template <class E>
E load(const E* p, Line line = Line::current()) {
  return gpu_model::check_global(p, sizeof(E), gpu_model::Global::read, line) ? *p : E{};
}
template <class E>
void store(E* p, E x, Line line = Line::current()) {
  if (gpu_model::check_global(p, sizeof(E), gpu_model::Global::write, line)) *p = x;
}
inline void store16(void* p, Chunk x, Line line = Line::current()) {
  store(static_cast<Chunk*>(p), x, line);
}
inline void raise(int* flag, Line line = Line::current()) {
  if (gpu_model::check_global(flag, sizeof *flag, gpu_model::Global::atomic, line)) *flag = 1;
}

inline void store_shared(uint32_t address, uint32_t x, Line line = Line::current()) {
  gpu_model::write_shared(address, &x, sizeof x, line);
}
inline Chunk load_shared16(uint32_t address, Line line = Line::current()) {
  Chunk x;
  gpu_model::read_shared(address, &x, sizeof x, line);
  return x;
}

inline void copy16(uint32_t to, const void* from, bool valid, Line line = Line::current()) {
  gpu_model::copy16(to, from, valid, line);
}
using gpu_model::commit_copies;
using gpu_model::wait_for_copies;

template <bool Transposed>
void load_matrices(uint32_t (&r)[4], uint32_t address, Line line = Line::current()) {
  gpu_model::load_matrices(r, address, Transposed, line);
}
template <class E>
void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Line line = Line::current()) {
  gpu_model::multiply_add(d, a, {b0, b1}, [](uint16_t bits) -> float { return E{bits}; }, line);
}
template <class E>
uint32_t pack(float low, float high) {
  return E::from(low).bits | uint32_t(E::from(high).bits) << 16;
}

template <class T>
T exp2(T x) {
  return std::exp2(x);
}
template <class T>
T log2(T x) {
  return std::log2(x);
}
template <class T>
T tanh(T x) {
  return std::tanh(x);
}
inline double sin(double x) {
  return std::sin(x);
}
inline double cos(double x) {
  return std::cos(x);
}
template <class T>
T multiply(T a, T b) {
  return a * b;
}
template <class T>
T fma(T a, T b, T c) {
  return std::fma(a, b, c);
}
inline float exp2_fast(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0 : y;
}

inline float reciprocal_fast(float x) {
  return 1 / x;
}

inline int shared_memory_limit() {
  return gpu_model::options().shared_bytes;
}

template <class... Parameters>
void launch(void (*kernel)(Parameters...), Index blocks, int threads, int shared_bytes, void*,
            const std::type_identity_t<Parameters>&... parameters) {
  const auto bytes = [](const auto& x) { return std::span(reinterpret_cast<const unsigned char*>(&x), sizeof x); };
  gpu_model::launch(blocks, threads, shared_bytes,
                    {[&] { kernel(parameters...); }, reinterpret_cast<const void*>(kernel), {bytes(parameters)...}});
}

}  // namespace attention_ops::device
