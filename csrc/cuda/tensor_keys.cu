// Starts the keys' side of the backward pass on tensor cores.
#include "cuda/kernels.h"
#include "cuda/tensor_dispatch.h"
#include "kernels/cuda/tensor_keys.cuh"

namespace attention_ops {

void tensor_keys(const Problem& p, const BackwardInput& in, const BackwardResult& result, Stream stream) {
  with_tensor_kind(p, [&]<class E, int Width, bool Extra>() {
    using Shape = KeysShape<Width, Extra>;
    const auto start = [&]<Wanted W>() {
      const Index tiles = tiles_of(p.keys, Shape::kOwn);
      device::launch(tensor_keys_kernel<E, Shape, W>, p.batch * p.key_heads * tiles, Shape::kThreads,
                     KeysMemory<Shape>::kBytes, stream, p, in, result, int(tiles));
    };
    const bool key = result.grad_key.defined(), value = result.grad_value.defined();
    if constexpr (Width <= 128) {
      if (key && value) return start.template operator()<Wanted::both>();
    }
    if (key) start.template operator()<Wanted::key>();
    if (value) start.template operator()<Wanted::value>();
  });
}

}  // namespace attention_ops
