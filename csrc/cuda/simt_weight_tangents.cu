// Starts the kernels of the weights' and summaries' forward mode and second derivatives.
#include "cuda/simt_weights_launch.h"
#include "kernels/cuda/simt_weight_second.cuh"

namespace attention_ops {

void simt_weights(const Problem& p, const BackwardInput& in, const Tangents& along, const Tensor4& weights,
                  bool average, Stream stream) {
  start_weights(p, in, along, weights, average, stream);
}

void simt_summaries(const Problem& p, const BackwardInput& in, const Tangents& along, const Summaries& result,
                    Stream stream) {
  start_summaries(p, in, along, result, stream);
}

void simt_backward(const Problem& p, const BackwardInput& in, const WeightGradientTangent& along,
                   const BackwardResult& result, Stream stream) {
  start_backward(p, in, along, result, stream);
}

void simt_bias(const Problem& p, const BackwardInput& in, const WeightGradientTangent& along, const Tensor4& grad,
               const BiasPlan& plan, Stream stream) {
  start_bias(p, in, along, grad, plan, stream);
}

void simt_distance(const Problem& p, const BackwardInput& in, const WeightGradientTangent& along, const Tensor4& grad,
                   const DistancePlan& plan, Stream stream) {
  start_distance(p, in, along, grad, plan, stream);
}

}  // namespace attention_ops
