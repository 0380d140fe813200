// From tensors to the problem of a kernel. Plain kernels widen elements where they read them, so nothing is copied.
#pragma once
#include "cuda/aligned.h"
#include "cuda/call.h"
#include "cuda/kernels.h"
#include "ops/allocate.h"
#include "ops/views.h"

namespace attention_ops {

inline void* pointer(const Call& call, const Tensor& x) {
  return x.defined() ? call.writes(x).mutable_data_ptr() : nullptr;
}
inline Tensor4 result(const Call& call, const Tensor& x) {
  return x.defined() ? result_view4(call.writes(x)) : Tensor4{};
}

// A contiguous tensor of the type that scores are computed in; a null pointer for none.
class Numbers {
 public:
  Numbers() = default;
  Numbers(const Call& call, const OptionalTensor& x, at::ScalarType type) {
    if (x && x->defined()) tensor_ = call.reads(x->to(type).contiguous());
  }
  const void* data() const { return tensor_.defined() ? tensor_.const_data_ptr() : nullptr; }

 private:
  Tensor tensor_;
};

// Rows by distance in the type that scores are computed in, or none.
class DistanceRows {
 public:
  DistanceRows(const Call& call, const OptionalTensor& x, at::ScalarType type) {
    if (x && x->defined()) tensor_ = call.reads(in_type(*x, type));
  }
  Tensor4 view() const { return tensor_.defined() ? read_view(tensor_) : Tensor4{}; }

 private:
  Tensor tensor_;
};

// A four-dimensional tensor that plain kernels read, or none.
inline Tensor4 read(const Call& call, const OptionalTensor& x) {
  return x && x->defined() ? read_view(call.reads(*x)) : Tensor4{};
}

// Four-dimensional tensors as kernels read them.
class Operand {
 public:
  Operand(const Call& call, const Tensor& x, bool on_tensor_cores) : tensor_(on_tensor_cores ? aligned(x) : x) {
    call.reads(tensor_);
  }
  Tensor4 view() const { return read_view(tensor_); }

 private:
  Tensor tensor_;
};

// The problem of one call, with the tensors that it points into.
class Loaded {
 public:
  Loaded(const Call& call, const Attention& a, bool on_tensor_cores)
      : on_tensor_cores(on_tensor_cores),
        query_(call, a.query, on_tensor_cores),
        key_(call, a.key, on_tensor_cores),
        value_(call, a.value, on_tensor_cores),
        distance_(call, a.distance, lse_type(a.query)),
        sinks_(call, a.sinks, lse_type(a.query)),
        seed_(call, a.seed, at::kLong) {
    problem.batch = a.query.size(0), problem.heads = a.query.size(1), problem.queries = a.query.size(2);
    problem.width = a.query.size(3), problem.key_heads = a.key.size(1), problem.keys = a.key.size(2);
    problem.value_width = a.value.size(3);
    problem.q = query_.view(), problem.k = key_.view(), problem.v = value_.view();
    if (a.bias) problem.bias = read_view(call.reads(*a.bias));
    problem.distance = distance_.view();
    problem.sinks = sinks_.data();
    for (const Tensor& x : a.mask_data) call.reads(x);
    const MaskArguments mask(a);
    problem.mask = MaskProgram(mask.view(problem.queries, problem.keys));
    problem.scale = a.scale, problem.softcap = a.softcap;
    problem.product_scale = a.softcap > 0 ? a.scale / a.softcap : a.scale;
    if (a.dropout_p > 0) problem.dropout = {a.dropout_p, static_cast<const int64_t*>(seed_.data()), a.seed->dim() == 2};
  }
  Loaded(const Loaded&) = delete;

  // The mask sees other rows and heads than their order here.
  void place(const Call& call, const Attention& a, Opt heads, Opt rows, Index queries) {
    heads_ = Numbers(call, heads, at::kInt), rows_ = Numbers(call, rows, at::kInt);
    problem.true_heads = static_cast<const int32_t*>(heads_.data());
    problem.true_rows = static_cast<const int32_t*>(rows_.data());
    const MaskArguments mask(a);
    problem.mask = MaskProgram(mask.view(queries, problem.keys));
  }

  // Whether a tile can have hidden places that hold something.
  bool hides() const { return !problem.mask.empty() || problem.adds(); }

  Problem problem;
  bool on_tensor_cores;

 private:
  Operand query_, key_, value_;
  DistanceRows distance_;
  Numbers sinks_, seed_, heads_, rows_;
};

// The tangents of one call's inputs, and of lse where it is one.
class LoadedTangents {
 public:
  LoadedTangents(const Call& call, In lse, Opt query, Opt key, Opt value, Opt bias, Opt distance, Opt sinks,
                 Opt lse_t = std::nullopt)
      : distance_(call, distance, lse.scalar_type()),
        sinks_(call, sinks, lse.scalar_type()),
        lse_(call, lse_t, lse.scalar_type()) {
    view = {read(call, query), read(call, key), read(call, value), read(call, bias),
            distance_.view(),  sinks_.data(),   lse_.data()};
  }
  LoadedTangents(const LoadedTangents&) = delete;

  Tangents view;

 private:
  DistanceRows distance_;
  Numbers sinks_, lse_;
};

}  // namespace attention_ops
