// From tensors to what kernels take: types, views, masks. A type that a processor cannot compute in well is widened.
#pragma once
#include "kernels/cpu/problem.h"
#include "ops/allocate.h"
#include "ops/views.h"

namespace attention_ops {

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
  Matrices<const T> view() const {
    return {static_cast<const T*>(tensor_.const_data_ptr()), tensor_.stride(0), tensor_.stride(1), tensor_.stride(2)};
  }

 private:
  Tensor tensor_;
};

template <class T>
Matrices<T> result_view(const Tensor& x) {
  if (!x.defined()) return {};
  return {x.mutable_data_ptr<T>(), x.stride(0), x.stride(1), x.stride(2)};
}

// The problem of one call, with the tensors that it points into. Keys and values are rows of E.
template <class T, class E = T>
class Loaded {
 public:
  explicit Loaded(const Attention& a)
      : query_(a.query), key_(a.key), value_(a.value), sinks_(a.sinks), seed_(a.seed), mask_(a) {
    problem.batch = a.query.size(0), problem.heads = a.query.size(1), problem.queries = a.query.size(2);
    problem.width = a.query.size(3), problem.key_heads = a.key.size(1), problem.keys = a.key.size(2);
    problem.value_width = a.value.size(3);
    problem.q = query_.view();
    if constexpr (std::is_same_v<T, E>) problem.k = key(), problem.v = value();
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

  Matrices<const E> key() const { return key_.view(); }
  Matrices<const E> value() const { return value_.view(); }

  Problem<T> problem;

 private:
  Operand<T> query_;
  Operand<E> key_, value_;
  Vector<T> sinks_;
  Vector<int64_t> seed_, heads_{std::nullopt}, rows_{std::nullopt};
  MaskArguments mask_;
};

}  // namespace attention_ops
