// Which weights dropout keeps on CUDA, as a tensor.
#include <ATen/ops/empty.h>

#include "cuda/arguments.h"
#include "cuda/operators.h"

namespace attention_ops {

Tensor dropout_mask_cuda(In seed, int64_t batch, int64_t heads, int64_t queries, int64_t keys, double dropout_p) {
  const Call call(seed);
  const Tensor kept = at::empty({batch, heads, queries, keys}, seed.options().dtype(at::kBool));
  const Numbers seeds(call, seed, at::kLong);
  const Dropout dropout{dropout_p, static_cast<const int64_t*>(seeds.data()), seed.dim() == 2};
  simt_dropout({dropout, batch, heads, queries, keys, static_cast<bool*>(pointer(call, kept))}, call.stream());
  return kept;
}

}  // namespace attention_ops
