// Starts the kernels of the weights, of their summaries and of their gradients.
#include "cuda/kernels.h"
#include "cuda/simt_launch.h"
#include "kernels/cuda/simt_weight_gradient.cuh"

namespace attention_ops {

using device::launch;

void simt_weights(const Problem& p, const BackwardInput& in, const Tensor4& weights, bool average, Stream stream) {
  const Index rows = tiles_of(p.queries, kSimtTile), columns = tiles_of(p.keys, kSimtTile);
  const Index tasks = p.batch * (average ? 1 : p.heads) * rows * columns;
  in_compute_type(p, [&]<class T>() {
    launch(simt_weights_kernel<T>, tasks, kSimtThreads, SimtMemory<T>::kBytes, stream, p, in, weights, average, rows,
           columns, tasks);
  });
}

void simt_summaries(const Problem& p, const BackwardInput& in, const Summaries& result, Stream stream) {
  const Index rows = tiles_of(p.queries, kSimtTile), columns = tiles_of(p.keys, kSimtTile);
  const Index row_tasks = p.batch * p.heads * rows, column_tasks = p.batch * p.heads * columns;
  in_compute_type(p, [&]<class T>() {
    launch(simt_row_summaries_kernel<T>, row_tasks, kSimtThreads, SimtMemory<T>::kBytes, stream, p, in, result, rows,
           row_tasks);
    launch(simt_column_sums_kernel<T>, column_tasks, kSimtThreads, SimtMemory<T>::kBytes, stream, p, in, result,
           columns, column_tasks);
  });
}

void simt_backward(const Problem& p, const BackwardInput& in, const WeightGradient& source,
                   const BackwardResult& result, Stream stream) {
  start_backward(p, in, source, result, stream);
}

void simt_bias(const Problem& p, const BackwardInput& in, const WeightGradient& source, const Tensor4& grad,
               const BiasPlan& plan, Stream stream) {
  start_bias(p, in, source, grad, plan, stream);
}

}  // namespace attention_ops
