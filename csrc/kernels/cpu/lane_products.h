// Sums over the keys of a span, queries in lanes: out[column][query] += sum_k rows[k][column] a[k][query]. Each span is
// summed by itself, which keeps the error of many keys small. Both buffers have `Width` lanes and are given from the
// span's first lane and key on.
#pragma once
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/pairs.h"

namespace attention_ops {

template <int Width, int NV, class T>
inline void add_to_lanes(T* out, const T* rows, Index stride, const T* a, Index columns, int keys) {
  each_row_tile<kTileRows<NV>>(columns, [&](auto tile_rows, Index c) {
    Accumulators<T, tile_rows, NV> acc{};
    multiply_columns<T, tile_rows, NV>(acc, rows + c, stride, a, Width, keys);
    each<T, tile_rows, NV>(acc, [&](Vec<T>& x, int r, int n) {
      T* to = out + (c + r) * Width + n * kLanes<T>;
      store(to, load(to) + x);
    });
  });
}

// The same, to the bit, without touching the rows that a lane does not see (`visible`; all if null): masked places may
// hold anything, and 0 times it may be NaN. Of pairs, only what their panels leave out.
template <int Width, int NV, class T, class E>
inline void add_visible_to_lanes(T* out, const E* rows, Index stride, const T* a, Index columns, int keys,
                                 const LaneInt<T>* visible) {
  for (Index c = 0; c < columns; ++c)
    for (int n = 0; n < NV * kLanes<T>; n += kLanes<T>) {
      Vec<T> acc{};
      for (int k = 0; k < keys; ++k) {
        const Vec<T> x = left_out<T, E>(splat(T(rows[k * stride + c]))), sum = fma(x, load(a + k * Width + n), acc);
        acc = (visible ? load_lanes<T>(visible + k * Width + n) : ~Ints<T>{}) ? sum : acc;
      }
      store(out + c * Width + n, load(out + c * Width + n) + acc);
    }
}

}  // namespace attention_ops
