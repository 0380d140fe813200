// Starts the kernels of the weights and of their summaries, or of their tangents.
#pragma once
#include "cuda/kernels.h"
#include "cuda/simt_launch.h"
#include "kernels/cuda/simt_weights.cuh"

namespace attention_ops {

template <class Along>
void start_weights(const Problem& p, const BackwardInput& in, const Along& along, const Tensor4& weights, bool average,
                   Stream stream) {
  const Index rows = tiles_of(p.queries, kSimtTile), columns = tiles_of(p.keys, kSimtTile);
  const Index tasks = p.batch * (average ? 1 : p.heads) * rows * columns;
  in_compute_type(p, [&]<class T>() {
    device::launch(simt_weights_kernel<T, Along>, tasks, kSimtThreads, SimtMemory<T>::kBytes, stream, p, in, along,
                   weights, average, rows, columns, tasks);
  });
}

template <class Along>
void start_summaries(const Problem& p, const BackwardInput& in, const Along& along, const Summaries& result,
                     Stream stream) {
  const Index rows = tiles_of(p.queries, kSimtTile), columns = tiles_of(p.keys, kSimtTile);
  const Index row_tasks = p.batch * p.heads * rows, column_tasks = p.batch * p.heads * columns;
  in_compute_type(p, [&]<class T>() {
    device::launch(simt_row_summaries_kernel<T, Along>, row_tasks, kSimtThreads, SimtMemory<T>::kBytes, stream, p, in,
                   along, result, rows, row_tasks);
    device::launch(simt_column_sums_kernel<T, Along>, column_tasks, kSimtThreads, SimtMemory<T>::kBytes, stream, p, in,
                   along, result, columns, column_tasks);
  });
}

}  // namespace attention_ops
