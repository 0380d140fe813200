// From tensors to what kernels of any backend take: the type of computation, views, masks.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <vector>

#include "kernels/mask/parse.h"
#include "kernels/view.h"
#include "ops/ops.h"

namespace attention_ops {

// Calls f<T>() with the type that the tensor's elements are computed in.
template <class F>
auto in_compute_type(const Tensor& x, F&& f) {
  return x.scalar_type() == at::kDouble ? f.template operator()<double>() : f.template operator()<float>();
}

// The same with the type that they are stored in.
template <class F>
auto in_element_type(const Tensor& x, F&& f) {
  switch (x.scalar_type()) {
    case at::kDouble:
      return f.template operator()<double>();
    case at::kFloat:
      return f.template operator()<float>();
    case at::kBFloat16:
      return f.template operator()<BFloat16>();
    default:
      return f.template operator()<Float16>();
  }
}

template <class T>
constexpr auto kScalarType = c10::CppTypeToScalarType<T>::value;
template <>
constexpr auto kScalarType<BFloat16> = at::kBFloat16;
template <>
constexpr auto kScalarType<Float16> = at::kHalf;

// A call of `to` is a dispatch even where it has nothing to do.
inline Tensor in_type(const Tensor& x, at::ScalarType type) {
  return x.scalar_type() == type ? x : x.to(type);
}

template <class T>
Tensor empty_of(const Tensor& like, at::IntArrayRef sizes) {
  return at::empty(sizes, like.options().dtype(kScalarType<T>));
}

inline Element element_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case at::kDouble:
      return Element::float64;
    case at::kFloat:
      return Element::float32;
    case at::kBFloat16:
      return Element::bfloat16;
    default:
      return Element::float16;
  }
}

inline Tensor4 tensor4(const Tensor& x, void* data) {
  Tensor4 view{data, element_of(x), {}, {}};
  for (int d = 0; d < 4; ++d) view.sizes[d] = x.size(d), view.strides[d] = x.size(d) == 1 ? 0 : x.stride(d);
  return view;
}
inline Tensor4 read_view(const Tensor& x) {
  return tensor4(x, const_cast<void*>(x.const_data_ptr()));
}
inline Tensor4 result_view4(const Tensor& x) {
  return x.defined() ? tensor4(x, x.mutable_data_ptr()) : Tensor4{};
}

// A contiguous tensor of T, or a null pointer.
template <class T>
class Vector {
 public:
  explicit Vector(const OptionalTensor& x) {
    if (x && x->defined()) tensor_ = in_type(*x, kScalarType<T>).contiguous();
  }
  const T* data() const { return tensor_.defined() ? tensor_.const_data_ptr<T>() : nullptr; }

 private:
  Tensor tensor_;
};

// The mask's expression and where its tensors lie.
class MaskArguments {
 public:
  explicit MaskArguments(const Attention& a) : spec_(parse_mask(a.mask)) {
    for (const Tensor& x : a.mask_data) {
      MaskData data{x.const_data_ptr(), {}};
      for (int d = 0; d < x.dim(); ++d) data.strides[d] = x.size(d) == 1 ? 0 : x.stride(d);
      data_.push_back(data);
    }
  }
  MaskProblem view(Index queries, Index keys) const {
    return {&spec_, data_.data(), static_cast<int32_t>(queries), static_cast<int32_t>(keys)};
  }

 private:
  MaskSpec spec_;
  std::vector<MaskData> data_;
};

}  // namespace attention_ops
