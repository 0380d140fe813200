// From tensors to what kernels take: types, views, masks. A type that a processor cannot compute in well is widened.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "kernels/cpu/pairs.h"
#include "kernels/cpu/problem.h"
#include "kernels/mask/parse.h"
#include "ops/allocate.h"
#include "ops/ops.h"

namespace attention_ops {

constexpr Index kLeastPairs = 1024;  // queries times keys

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

// Calls f<T, E>() with the types that sums and rows of attention have. Rows of bfloat16 stay as they are where that is
// fast, but for small problems: padding to the units of products would be most of the work.
template <class F>
auto in_row_types(const Attention& a, F&& f) {
  if constexpr (kFastPairs)
    if (a.query.scalar_type() == at::kBFloat16 && a.query.size(2) * a.key.size(2) >= kLeastPairs)
      return f.template operator()<float, BFloat16>();
  return in_compute_type(a.query, [&]<class T>() { return f.template operator()<T, T>(); });
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

// As the layers above lay it out, in elements of T.
template <class T>
Tensor empty_rows(const Tensor& like, at::IntArrayRef sizes) {
  return empty_heads(like.options().dtype(kScalarType<T>), sizes[0], sizes[1], sizes[2], sizes[3]);
}

// A four-dimensional tensor as rows of T.
template <class T>
class Operand {
 public:
  explicit Operand(const Tensor& x) : tensor_(in_type(x, kScalarType<T>)) {
    if (tensor_.size(3) > 1 && tensor_.stride(3) != 1) tensor_ = tensor_.contiguous();
  }
  // Readable in whole units of rows and columns, with zeros past its own.
  static Operand padded(const Tensor& x) {
    const Index rows = round_up(x.size(2), kRowUnit<T>), columns = round_up(x.size(3), kDepthUnit<T>);
    if (rows == x.size(2) && columns == x.size(3)) return Operand(x);
    const Tensor whole = at::zeros({x.size(0), x.size(1), rows, columns}, x.options());
    whole.narrow(2, 0, x.size(2)).narrow(3, 0, x.size(3)).copy_(x);
    return Operand(whole);
  }
  Matrices<const T> view() const {
    return {static_cast<const T*>(tensor_.const_data_ptr()), tensor_.stride(0), tensor_.stride(1), tensor_.stride(2)};
  }

 private:
  Tensor tensor_;
};

template <class T>
Matrices<T> result_view(const Tensor& x) {
  if (!x.defined()) return {};
  return {static_cast<T*>(x.mutable_data_ptr()), x.stride(0), x.stride(1), x.stride(2)};
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

// The problem of one call, with the tensors that it points into. Keys and values are rows of E, queries of Q.
template <class T, class E = T, class Q = T>
class Loaded {
 public:
  explicit Loaded(const Attention& a)
      : query_(a.query), key_(rows_of(a.key)), value_(rows_of(a.value)), sinks_(a.sinks), seed_(a.seed), mask_(a) {
    problem.batch = a.query.size(0), problem.heads = a.query.size(1), problem.queries = a.query.size(2);
    problem.width = a.query.size(3), problem.key_heads = a.key.size(1), problem.keys = a.key.size(2);
    problem.value_width = a.value.size(3);
    problem.q = query_.view();
    if constexpr (std::is_same_v<Q, E>) problem.k = key(), problem.v = value();
    if (a.bias) problem.bias = read_view(*a.bias);
    problem.sinks = sinks_.data();
    problem.mask = mask_.view(problem.queries, problem.keys);
    problem.scale = T(a.scale), problem.softcap = T(a.softcap);
    if (a.dropout_p > 0) problem.dropout = {a.dropout_p, seed_.data(), a.seed->dim() == 2};
  }
  Loaded(const Loaded&) = delete;

  // The mask sees other rows and heads than their order here.
  void place(Opt heads, Opt rows, Index queries) {
    heads_ = Vector<int64_t>(heads), rows_ = Vector<int64_t>(rows);
    problem.true_heads = heads_.data(), problem.true_rows = rows_.data();
    problem.mask = mask_.view(queries, problem.keys);
  }

  // Padded where products of pairs read them.
  static Operand<E> rows_of(const Tensor& x) { return kPaired<Q> ? Operand<E>::padded(x) : Operand<E>(x); }

  Matrices<const E> key() const { return key_.view(); }
  Matrices<const E> value() const { return value_.view(); }

  Problem<T, Q> problem;

 private:
  Operand<Q> query_;
  Operand<E> key_, value_;
  Vector<T> sinks_;
  Vector<int64_t> seed_, heads_{std::nullopt}, rows_{std::nullopt};
  MaskArguments mask_;
};

}  // namespace attention_ops
