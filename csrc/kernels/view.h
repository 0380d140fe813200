// Plain views of memory that kernels work on. Torch-free.
#pragma once
#include <bit>
#include <cstdint>

#include "kernels/host_device.h"

namespace attention_ops {

using Index = int64_t;

// [B, H, rows, columns] with columns next to each other; a stride of zero repeats.
template <class T>
struct Matrices {
  T* data = nullptr;
  Index batch_stride = 0, head_stride = 0, row_stride = 0;

  T* at(Index b, Index h) const { return data + b * batch_stride + h * head_stride; }
};

// Rows of a tensor, or of scratch memory, as one operand of a product: readable in the product's whole units.
template <class T>
struct PaddedRows {
  const T* data;
  Index stride;
};

inline Index round_up(Index x, Index unit) {
  return (x + unit - 1) / unit * unit;
}

// How an element is stored where kernels read or write it without a copy (a bias and its gradient).
enum class Element { float64, float32, bfloat16, float16 };

// [B|1, H|1, Lq|1, Lk|1] of any element type and strides; a size of one has stride zero.
struct Tensor4 {
  void* data = nullptr;
  Element element = Element::float32;
  Index sizes[4] = {}, strides[4] = {};

  HOST_DEVICE bool defined() const { return data != nullptr; }
};

struct BFloat16 {
  uint16_t bits;

  HOST_DEVICE operator float() const { return std::bit_cast<float>(uint32_t(bits) << 16); }
  HOST_DEVICE static BFloat16 from(float x) {
    const uint32_t u = std::bit_cast<uint32_t>(x);
    if (x != x) return {uint16_t((u >> 16) | 0x40)};
    return {uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
  }
};

struct Float16 {
  uint16_t bits;

  HOST_DEVICE operator float() const {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, magnitude = uint32_t(bits & 0x7fff) << 13;
    const float subnormal = float(int(bits & 0x3ff)) * 0x1p-24f;  // through no float that is subnormal itself
    const uint32_t exponent = (bits & 0x7c00) == 0x7c00 ? 0x70000000u : 0x38000000u;
    const uint32_t finite = bits & 0x7c00 ? magnitude + exponent : std::bit_cast<uint32_t>(subnormal);
    return std::bit_cast<float>(sign | finite);
  }
  HOST_DEVICE static Float16 from(float x) {
    const uint32_t u = std::bit_cast<uint32_t>(x), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
    if (magnitude > 0x7f800000) return {uint16_t(sign | 0x7e00)};
    if (magnitude >= 0x477ff000) return {uint16_t(sign | 0x7c00)};  // rounds past 65504
    if (magnitude < 0x38800000) {                                   // subnormal: the addition rounds at the right bit
      const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
      return {uint16_t(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000))};
    }
    return {uint16_t(sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13))};
  }
};

// Calls f with a null pointer of the stored type.
template <class F>
HOST_DEVICE void with_element(Element element, F&& f) {
  switch (element) {
    case Element::float64:
      return f(static_cast<double*>(nullptr));
    case Element::float32:
      return f(static_cast<float*>(nullptr));
    case Element::bfloat16:
      return f(static_cast<BFloat16*>(nullptr));
    case Element::float16:
      return f(static_cast<Float16*>(nullptr));
  }
}

template <class To, class From>
HOST_DEVICE To convert(From x) {
  if constexpr (requires { To::from(float(x)); })
    return To::from(float(x));
  else
    return static_cast<To>(x);
}

}  // namespace attention_ops
