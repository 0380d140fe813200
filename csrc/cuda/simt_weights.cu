// Starts the kernels of the weights, of their summaries and of their gradients.
#include "cuda/simt_weights_launch.h"
#include "kernels/cuda/simt_weight_gradient.cuh"

namespace attention_ops {

void simt_weights(const Problem& p, const BackwardInput& in, const Tensor4& weights, bool average, Stream stream) {
  start_weights(p, in, Still{}, weights, average, stream);
}

void simt_summaries(const Problem& p, const BackwardInput& in, const Summaries& result, Stream stream) {
  start_summaries(p, in, Still{}, result, stream);
}

void simt_backward(const Problem& p, const BackwardInput& in, const WeightGradient& source,
                   const BackwardResult& result, Stream stream) {
  start_backward(p, in, source, result, stream);
}

void simt_bias(const Problem& p, const BackwardInput& in, const WeightGradient& source, const Tensor4& grad,
               const BiasPlan& plan, Stream stream) {
  start_bias(p, in, source, grad, plan, stream);
}

void simt_distance(const Problem& p, const BackwardInput& in, const WeightGradient& source, const Tensor4& grad,
                   const DistancePlan& plan, Stream stream) {
  start_distance(p, in, source, grad, plan, stream);
}

}  // namespace attention_ops
