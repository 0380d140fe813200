// The kernels by name: each function picks grid and shared memory and starts what its problem needs. Torch-free; the
// .cu files beside it are all that the CUDA compiler sees.
#pragma once
#include "kernels/cuda/problem.h"

namespace attention_ops {

// Plain arithmetic: sums in float64 where the query is, in float32 otherwise.
void simt_forward(const Problem& p, const ForwardResult& result, Stream stream);
void simt_decode(const Problem& p, const DecodePlan& plan, const ForwardResult& result, Stream stream);
void simt_prepare(const Problem& p, const BackwardInput& in, Stream stream);
void simt_backward(const Problem& p, const BackwardInput& in, const BackwardResult& result, Stream stream);
void simt_bias(const Problem& p, const BackwardInput& in, const Tensor4& grad, const BiasPlan& plan, Stream stream);
void simt_distance(const Problem& p, const BackwardInput& in, const Tensor4& grad, const DistancePlan& plan,
                   Stream stream);
void simt_sinks(const Problem& p, const BackwardInput& in, void* grad_sinks, Stream stream);
void simt_dropout(const DropoutMask& p, Stream stream);
void simt_weights(const Problem& p, const BackwardInput& in, const Tensor4& weights, bool average, Stream stream);
void simt_summaries(const Problem& p, const BackwardInput& in, const Summaries& result, Stream stream);
void simt_backward(const Problem& p, const BackwardInput& in, const WeightGradient& source,
                   const BackwardResult& result, Stream stream);
void simt_bias(const Problem& p, const BackwardInput& in, const WeightGradient& source, const Tensor4& grad,
               const BiasPlan& plan, Stream stream);
void simt_distance(const Problem& p, const BackwardInput& in, const WeightGradient& source, const Tensor4& grad,
                   const DistancePlan& plan, Stream stream);
void simt_weights(const Problem& p, const BackwardInput& in, const Tangents& along, const Tensor4& weights,
                  bool average, Stream stream);
void simt_summaries(const Problem& p, const BackwardInput& in, const Tangents& along, const Summaries& result,
                    Stream stream);
void simt_backward(const Problem& p, const BackwardInput& in, const WeightGradientTangent& along,
                   const BackwardResult& result, Stream stream);
void simt_bias(const Problem& p, const BackwardInput& in, const WeightGradientTangent& along, const Tensor4& grad,
               const BiasPlan& plan, Stream stream);
void simt_distance(const Problem& p, const BackwardInput& in, const WeightGradientTangent& along, const Tensor4& grad,
                   const DistancePlan& plan, Stream stream);
void simt_rope(const RopeProblem& p, Stream stream);
void simt_rope_table(const RopeTableProblem& p, const RopeAxes& axes, Stream stream);

// Forward mode, from what simt_prepare found: the tangents of out and lse. With those, second derivatives: the tangents
// of what the functions of the same names give without a direction.
void simt_jvp(const Problem& p, const BackwardInput& in, const Tangents& along, const ForwardResult& result,
              Stream stream);
void simt_delta_tangent(const Problem& p, const BackwardInput& in, const BackwardTangent& along, Stream stream);
void simt_backward(const Problem& p, const BackwardInput& in, const BackwardTangent& along,
                   const BackwardResult& result, Stream stream);
void simt_bias(const Problem& p, const BackwardInput& in, const BackwardTangent& along, const Tensor4& grad,
               const BiasPlan& plan, Stream stream);
void simt_distance(const Problem& p, const BackwardInput& in, const BackwardTangent& along, const Tensor4& grad,
                   const DistancePlan& plan, Stream stream);
void simt_sinks(const Problem& p, const BackwardInput& in, const BackwardTangent& along, void* grad_sinks,
                Stream stream);

// Tensor cores: half types, rows aligned to sixteen bytes and not wider than 256. `inexact` is a flag or null: it is
// raised where a hidden place holds what is not finite, and the result is then to be computed in plain arithmetic.
void tensor_forward(const Problem& p, const ForwardResult& result, int* inexact, Stream stream);
void tensor_queries(const Problem& p, const BackwardInput& in, const Tensor4& grad_query, Stream stream);
void tensor_keys(const Problem& p, const BackwardInput& in, const BackwardResult& result, Stream stream);

}  // namespace attention_ops
