// Which weights dropout keeps, as a tensor; and two facts of this library that tests ask for.
#include <torch/library.h>

#include "cpu/launch.h"
#include "cpu/parallel.h"

namespace attention_ops {
namespace {

Tensor dropout_mask_cpu(In seed, int64_t batch, int64_t heads, int64_t queries, int64_t keys, double dropout_p) {
  const Tensor out = at::empty({batch, heads, queries, keys}, seed.options().dtype(at::kBool));
  const Vector<int64_t> seeds(seed);
  const Dropout dropout{dropout_p, seeds.data(), seed.dim() == 2};
  bool* kept = out.mutable_data_ptr<bool>();
  run_tasks(batch * heads * queries, 16.0 * batch * heads * queries * keys, 0, [&](Index row, Arena&) {
    const Index i = row % queries, bh = row / queries;
    const DropoutStream stream = dropout.stream(bh / heads, bh % heads);
    for (Index j = 0; j < keys; j += 8) {
      const Philox bits = stream.eight(uint32_t(i), uint32_t(j / 8));
      for (int n = 0; n < 8 && j + n < keys; ++n) kept[row * keys + j + n] = stream.keeps(bits, n);
    }
  });
  return out;
}

TORCH_LIBRARY_IMPL(attention_ops, CPU, m) {
  m.impl("_dropout_mask", dropout_mask_cpu);
}

// Tiles visited by all kernels since the last call, and the tile of the forward kernels: queries, keys. Elements of two
// bytes are bfloat16.
int64_t take_visited_tiles() {
  return visited_tiles.exchange(0);
}
std::vector<int64_t> tile_shape(int64_t itemsize) {
  if (itemsize == 8) return {Panel<double>::kWidth, kTileKeys};
  return {itemsize == 2 && kFastPairs ? Panel<float, BFloat16>::kWidth : Panel<float>::kWidth, kTileKeys};
}

TORCH_LIBRARY_IMPL(attention_ops, CompositeExplicitAutograd, m) {
  m.impl("_visited_tiles", take_visited_tiles);
  m.impl("_tile_shape", tile_shape);
}

}  // namespace
}  // namespace attention_ops
