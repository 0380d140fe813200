// The kernels by name: each function picks grid and shared memory and starts what its problem needs. Torch-free; the
// .cu files beside it are all that the CUDA compiler sees.
#pragma once
#include "kernels/cuda/problem.h"

namespace attention_ops {

// Plain arithmetic: sums in float64 where the query is, in float32 otherwise.
void simt_forward(const Problem& p, const ForwardResult& result, Stream stream);
void simt_prepare(const Problem& p, const BackwardInput& in, Stream stream);
void simt_backward(const Problem& p, const BackwardInput& in, const BackwardResult& result, Stream stream);
void simt_bias(const Problem& p, const BackwardInput& in, const Tensor4& grad, const BiasPlan& plan, Stream stream);
void simt_sinks(const Problem& p, const BackwardInput& in, void* grad_sinks, Stream stream);
void simt_dropout(const DropoutMask& p, Stream stream);

}  // namespace attention_ops
