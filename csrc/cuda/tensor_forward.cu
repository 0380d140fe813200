// Starts the forward kernel on tensor cores.
#include "cuda/kernels.h"
#include "cuda/tensor_dispatch.h"
#include "kernels/cuda/tensor_forward.cuh"

namespace attention_ops {

namespace {

template <class E, class Shape>
void start(const Problem& p, const ForwardResult& result, int* inexact, Stream stream) {
  const Index tiles = tiles_of(p.queries, Shape::kOwn);
  device::launch(tensor_forward_kernel<E, Shape>, p.batch * p.heads * tiles, Shape::kThreads,
                 ForwardMemory<Shape>::kBytes, stream, p, result, int(tiles), inexact);
}

}  // namespace

void tensor_forward(const Problem& p, const ForwardResult& result, int* inexact, Stream stream) {
  with_tensor_kind(p, [&]<class E, int Width, bool Extra>() {
    if constexpr (Width == 256 && !Extra)
      if (device::shared_memory_limit() >= ForwardMemory<WideForwardShape>::kBytes)
        return start<E, WideForwardShape>(p, result, inexact, stream);
    start<E, ForwardShape<Width, Extra>>(p, result, inexact, stream);
  });
}

}  // namespace attention_ops
