// Between rows, as tensors hold them, and lanes, as kernels do; and what is asked of rows alone.
#pragma once
#include <algorithm>
#include <concepts>

#include "kernels/cpu/vec_pairs.h"
#include "kernels/view.h"

namespace attention_ops {

// A loop over converted elements would not become vectors for half types.
inline Vec<float> widen(Halves x, BFloat16) {
  return std::bit_cast<Vec<float>>(__builtin_convertvector(x, Ints<float>) << 16);
}
inline Vec<float> widen(Halves x, Float16) {
  const Ints<float> bits = __builtin_convertvector(x, Ints<float>), magnitude = bits & 0x7fff;
  const Ints<float> normal = (magnitude << 13) + (magnitude < 0x7c00 ? Ints<float>{} + 0x38000000 : 0x70000000);
  const Vec<float> subnormal = __builtin_convertvector(magnitude, Vec<float>) * splat(0x1p-24f);
  const Ints<float> value = magnitude < 0x400 ? std::bit_cast<Ints<float>>(subnormal) : normal;
  return std::bit_cast<Vec<float>>(value | (bits & 0x8000) << 16);
}
inline Halves narrow(Vec<float> x, BFloat16) {
  return round_halves(x);
}
// Rounded to even; NaN stays one.
inline Halves narrow(Vec<float> x, Float16) {
  const Ints<float> bits = std::bit_cast<Ints<float>>(x), magnitude = bits & 0x7fffffff;
  const Ints<float> normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const Vec<float> shifted = std::bit_cast<Vec<float>>(magnitude) + splat(0.5f);  // rounds at a subnormal's last bit
  const Ints<float> subnormal = std::bit_cast<Ints<float>>(shifted) - 0x3f000000;
  const Ints<float> special = magnitude > 0x7f800000 ? Ints<float>{} + 0x7e00 : 0x7c00;
  const Ints<float> rounded = magnitude < 0x38800000 ? subnormal : magnitude < 0x477ff000 ? normal : special;
  return __builtin_convertvector(rounded | ((bits >> 16) & 0x8000), Halves);
}

// n elements, `stride` apart, in lanes.
template <class T, class E>
Vec<T> read_elements(const E* from, Index stride, int n) {
  if constexpr (std::is_same_v<T, E>)
    if (stride == 1) return n == kLanes<T> ? load(from) : load_part(from, n);
  if constexpr (std::is_same_v<T, float> && sizeof(E) == 2)
    if (stride == 1) return widen(load_halves(from, n), E());
  T lanes[kLanes<T>]{};
  for (int i = 0; i < n; ++i) lanes[i] = convert<T>(from[i * stride]);
  return load(lanes);
}

// n elements next to each other.
template <class E>
void write_elements(E* to, Vec<Wide<E>> x, int n) {
  if constexpr (sizeof(E) == 2) {
    const Halves halves = narrow(x, E());
    std::memcpy(to, &halves, n * sizeof *to);
  } else {
    n == kLanes<E> ? store(to, x) : store_part(to, x, n);
  }
}

// The same past the caches (stream).
template <class E>
void stream_elements(E* to, Vec<Wide<E>> x, int n) {
  if (n < kLanes<Wide<E>>) return write_elements(to, x, n);
  if constexpr (sizeof(E) == 2)
    stream(to, narrow(x, E()));
  else
    stream(to, x);
}

// dst[c][r] = read(r, c, n)[c], with read giving n <= lanes elements of row r from column c on; dst has `width` lanes,
// a multiple of a vector. The last row's vector is filled up with zeros; vectors past it are left alone.
template <class T, class Read>
inline void transpose_to_lanes(T* dst, int width, int rows, Index columns, Read&& read) {
  constexpr int kStep = kLanes<T>;
  for (int r = 0; r < rows; r += kStep)
    for (Index c = 0; c < columns; c += kStep) {
      const int count = int(std::min<Index>(kStep, columns - c));
      Vec<T> block[kStep];
      if (r + kStep <= rows && count == kStep) {  // the counts are constants here
        for (int i = 0; i < kStep; ++i) block[i] = read(r + i, c, kStep);
        transpose<T>(block);
        for (int i = 0; i < kStep; ++i) store(dst + (c + i) * width + r, block[i]);
        continue;
      }
      for (int i = 0; i < kStep; ++i) block[i] = r + i < rows ? read(r + i, c, count) : Vec<T>{};
      transpose<T>(block);
      for (int i = 0; i < count; ++i) store(dst + (c + i) * width + r, block[i]);
    }
}

// dst[c][r] = factor * src[r][c]
template <class T>
inline void rows_to_lanes(T* dst, int width, const T* src, Index stride, int rows, Index columns, T factor) {
  transpose_to_lanes(dst, width, rows, columns, [&](int r, Index c, int n) {
    const T* from = src + r * stride + c;
    return splat(factor) * (n == kLanes<T> ? load(from) : load_part(from, n));
  });
}

// Calls write(r, c, vector, n): the vector holds columns c .. c + n of row r, of src[c][r] * factors[r].
template <class T, class Write>
inline void lanes_to_rows(const T* src, Index width, const T* factors, int rows, Index columns, Write&& write) {
  constexpr int kStep = kLanes<T>;
  for (int r = 0; r < rows; r += kStep) {
    const Vec<T> factor = load(factors + r);
    for (Index c = 0; c < columns; c += kStep) {
      const int count = int(std::min<Index>(kStep, columns - c));
      Vec<T> block[kStep];
      if (r + kStep <= rows && count == kStep) {
        for (int i = 0; i < kStep; ++i) block[i] = factor * load(src + (c + i) * width + r);
        transpose<T>(block);
        for (int i = 0; i < kStep; ++i) write(r + i, c, block[i], kStep);
        continue;
      }
      for (int i = 0; i < kStep; ++i) block[i] = i < count ? factor * load(src + (c + i) * width + r) : Vec<T>{};
      transpose<T>(block);
      for (int i = 0; i < std::min(kStep, rows - r); ++i) write(r + i, c, block[i], count);
    }
  }
}

// dst[r][c] = src[c][r] * factors[r]
template <class T, class E>
inline void lanes_to_rows(E* dst, Index stride, const T* src, Index width, const T* factors, int rows, Index columns) {
  lanes_to_rows(src, width, factors, rows, columns,
                [&](int r, Index c, Vec<T> x, int n) { write_elements(dst + r * stride + c, x, n); });
}

// Calls f(column, n <= lanes) for pieces that fill 0 .. count.
template <class T, class F>
inline void each_piece(Index count, F&& f) {
  Index c = 0;
  for (; c + kLanes<T> <= count; c += kLanes<T>) f(c, kLanes<T>);
  if (c < count) f(c, int(count - c));
}

// a[r] b[r] for at most a vector of rows, one in each lane.
template <class T, class E>
inline Vec<T> dots(const PaddedRows<E>& a, const PaddedRows<E>& b, int rows, Index columns) {
  Vec<T> sums[kLanes<T>]{};
  for (int r = 0; r < rows; ++r)
    each_piece<T>(columns, [&](Index c, int n) {
      const Vec<T> x = read_elements<T>(a.data + r * a.stride + c, 1, n);
      sums[r] = fma(x, read_elements<T>(b.data + r * b.stride + c, 1, n), sums[r]);
    });
  return add_groups<T, kLanes<T>>(sums);
}

// Whether no element is infinite or NaN. Masked places may hold anything, and 0 times it is NaN.
template <class T, class E>
inline bool all_finite(const E* x, Index stride, Index rows, Index columns) {
  if constexpr (std::is_same_v<E, BFloat16>) {  // by its bits: a loop over converted elements would not become vectors
    Halves lost{};
    for (Index r = 0; r < rows; ++r)
      each_piece<T>(columns, [&](Index c, int n) {
        const Halves row = load_halves(x + r * stride + c, n);
        lost |= row ^ finite_part(row);
      });
    return !any(__builtin_convertvector(lost, Ints<float>));
  }
  Ints<T> lost{};
  for (Index r = 0; r < rows; ++r)
    each_piece<T>(columns, [&](Index c, int n) { lost |= not_finite(read_elements<T>(x + r * stride + c, 1, n)); });
  return !any(lost);
}

// A part of a dense tensor, to be asked for row by row: its rows lie in pages of their own, too far apart for the
// processor to foresee.
struct RowsToAsk {
  const char* data = nullptr;
  Index stride = 0, bytes = 0, rows = 0;

  void ask(Index row) const {
    if (row < rows) prefetch_row(data + row * stride, bytes);
  }
};

// Rows row .. row + rows and columns key .. key + keys of one batch and head, as far as there are any; none where rows
// repeat or columns lie apart.
inline RowsToAsk part_of(const Tensor4& x, Index b, Index h, Index row, Index rows, Index key, Index keys) {
  rows = std::min(rows, x.sizes[2] - row), keys = std::min(keys, x.sizes[3] - key);
  RowsToAsk part;
  if (rows <= 0 || keys <= 0 || x.strides[2] == 0 || x.strides[3] != 1) return part;
  with_element(x.element, [&]<class B>(B*) {
    const B* first = static_cast<const B*>(x.data) + b * x.strides[0] + h * x.strides[1] + row * x.strides[2] + key;
    part = {reinterpret_cast<const char*>(first), x.strides[2] * Index(sizeof(B)), keys * Index(sizeof(B)), rows};
  });
  return part;
}

}  // namespace attention_ops
