// The device of a call: current while this lives, with its stream. tests/gpu_model has its twin.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace attention_ops {

class Call {
 public:
  explicit Call(const at::Tensor& on) : guard_(on.device()) {}

  cudaStream_t stream() const { return c10::cuda::getCurrentCUDAStream().stream(); }
  // The tensors that this call's kernels read and write pass through here; the model watches them.
  const at::Tensor& reads(const at::Tensor& x) const { return x; }
  const at::Tensor& updates(const at::Tensor& x) const { return x; }
  const at::Tensor& writes(const at::Tensor& x) const { return x; }

 private:
  c10::cuda::CUDAGuard guard_;
};

}  // namespace attention_ops
