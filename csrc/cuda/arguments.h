// From tensors to the problem of a kernel. Elements are widened where they are read, so nothing is copied.
#pragma once
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
  Numbers(const Call& call, const OptionalTensor& x, at::ScalarType type) {
    if (x && x->defined()) tensor_ = call.reads(x->to(type).contiguous());
  }
  const void* data() const { return tensor_.defined() ? tensor_.const_data_ptr() : nullptr; }

 private:
  Tensor tensor_;
};

// The problem of one call, with the tensors that it points into.
class Loaded {
 public:
  Loaded(const Call& call, const Attention& a)
      : sinks_(call, a.sinks, lse_type(a.query)), seed_(call, a.seed, at::kLong) {
    problem.batch = a.query.size(0), problem.heads = a.query.size(1), problem.queries = a.query.size(2);
    problem.width = a.query.size(3), problem.key_heads = a.key.size(1), problem.keys = a.key.size(2);
    problem.value_width = a.value.size(3);
    problem.q = read_view(call.reads(a.query)), problem.k = read_view(call.reads(a.key));
    problem.v = read_view(call.reads(a.value));
    if (a.bias) problem.bias = read_view(call.reads(*a.bias));
    problem.sinks = sinks_.data();
    const MaskArguments mask(a);
    problem.mask = MaskProgram(mask.view(problem.queries, problem.keys));
    problem.scale = a.scale, problem.softcap = a.softcap;
    if (a.dropout_p > 0) problem.dropout = {a.dropout_p, static_cast<const int64_t*>(seed_.data()), a.seed->dim() == 2};
  }
  Loaded(const Loaded&) = delete;

  Problem problem;

 private:
  Numbers sinks_, seed_;
};

}  // namespace attention_ops
