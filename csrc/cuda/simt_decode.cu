// Starts the kernels for few rows over many keys.
#include "cuda/kernels.h"
#include "kernels/cuda/simt_decode.cuh"

namespace attention_ops {
namespace {

template <class T, int R>
void start(const Problem& p, const DecodePlan& plan, Stream stream) {
  device::launch(simt_decode_kernel<T, R>, plan.tasks(p), kDecodeThreads, DecodeMemory<T, R>::bytes(p.width), stream, p,
                 plan, plan.tasks(p));
}

template <class T>
void run(const Problem& p, const DecodePlan& plan, const ForwardResult& result, Stream stream) {
  plan.rows <= 1   ? start<T, 1>(p, plan, stream)
  : plan.rows <= 4 ? start<T, 4>(p, plan, stream)
  : plan.rows <= 8 ? start<T, 8>(p, plan, stream)
                   : start<T, int(kDecodeRows)>(p, plan, stream);
  const Index rows = p.rows();
  device::launch(simt_merge_kernel<T>, rows, kDecodeThreads, 0, stream, p, plan, result, rows);
}

}  // namespace

void simt_decode(const Problem& p, const DecodePlan& plan, const ForwardResult& result, Stream stream) {
  p.q.element == Element::float64 ? run<double>(p, plan, result, stream) : run<float>(p, plan, result, stream);
}

}  // namespace attention_ops
