// Starts the forward kernel on tensor cores.
#include "cuda/kernels.h"
#include "cuda/tensor_dispatch.h"
#include "kernels/cuda/tensor_forward.cuh"

namespace attention_ops {

void tensor_forward(const Problem& p, const ForwardResult& result, int* inexact, Stream stream) {
  with_tensor_kind(p, [&]<class E, int Width, bool Extra>() {
    using Shape = ForwardShape<Width, Extra>;
    const Index tiles = tiles_of(p.queries, Shape::kOwn);
    device::launch(tensor_forward_kernel<E, Shape>, p.batch * p.heads * tiles, Shape::kThreads,
                   ForwardMemory<Shape>::kBytes, stream, p, result, int(tiles), inexact);
  });
}

}  // namespace attention_ops
