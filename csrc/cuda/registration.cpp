// Gives the CUDA kernels to torch's dispatcher.
#include "cuda/operators.h"

namespace attention_ops {
namespace {

TORCH_LIBRARY_IMPL(attention_ops, CUDA, m) {
  register_operators(m);
}

}  // namespace
}  // namespace attention_ops
