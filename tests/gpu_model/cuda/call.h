// The twin of csrc/cuda/call.h: tensors lie in the processor's memory, and what kernels touch of them is watched.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstring>

#include "kernels/cuda/problem.h"
#include "model.h"

namespace attention_ops {

class Call {
 public:
  explicit Call(const at::Tensor&) {}
  ~Call() { gpu_model::end_watch(); }
  Call(const Call&) = delete;

  Stream stream() const { return nullptr; }
  const at::Tensor& reads(const at::Tensor& x) const { return watch(x, gpu_model::Access::read); }
  const at::Tensor& updates(const at::Tensor& x) const { return watch(x, gpu_model::Access::update); }
  // Poisoned first: what is never written shows.
  const at::Tensor& writes(const at::Tensor& x) const {
    if (x.numel() > 0 && !gpu_model::is_watched(x.const_data_ptr()))
      std::memset(x.mutable_data_ptr(), 0xff, x.nbytes());
    return watch(x, gpu_model::Access::write);
  }

 private:
  static const at::Tensor& watch(const at::Tensor& x, gpu_model::Access access) {
    if (x.numel() == 0) return x;
    size_t last = 0;
    for (int64_t d = 0; d < x.dim(); ++d) last += (x.size(d) - 1) * x.stride(d);
    const std::string name = std::string(c10::toString(x.scalar_type())) + "[" + std::to_string(x.numel()) + "]";
    gpu_model::watch(name, x.const_data_ptr(), (last + 1) * x.element_size(), x.element_size(), access);
    return x;
  }
};

}  // namespace attention_ops
