// Starts the queries' side of the backward pass on tensor cores.
#include "cuda/kernels.h"
#include "cuda/tensor_dispatch.h"
#include "kernels/cuda/tensor_queries.cuh"

namespace attention_ops {

void tensor_queries(const Problem& p, const BackwardInput& in, const Tensor4& grad_query, Stream stream) {
  with_tensor_kind(p, [&]<class E, int Width, bool Extra>() {
    using Shape = QueriesShape<Width, Extra>;
    const Index tiles = tiles_of(p.queries, Shape::kOwn);
    device::launch(tensor_queries_kernel<E, Shape>, p.batch * p.heads * tiles, Shape::kThreads,
                   QueriesMemory<Shape>::kBytes, stream, p, in, grad_query, int(tiles));
  });
}

}  // namespace attention_ops
