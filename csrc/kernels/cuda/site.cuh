// How a kernel reads one batch and head of its problem, in any element type and strides.
#pragma once
#include <numbers>

#include "kernels/cuda/problem.h"
#include "kernels/cuda/visible_tiles.cuh"

namespace attention_ops {

template <class T>
constexpr T kLog2e = std::numbers::log2e_v<T>;
template <class T>
constexpr T kLn2 = std::numbers::ln2_v<T>;
template <class T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();

// Finite numbers stay finite in log2 units, so that minus infinity alone means masked: those within a third of the
// range's ends become the ends.
template <class T>
DEVICE T in_log2_units(T x) {
  constexpr T limit = std::numeric_limits<T>::max();
  const T scaled = x * kLog2e<T>;
  if (!(x >= -limit && x <= limit)) return x;  // infinities and NaN as they are
  return scaled < -limit ? -limit : scaled > limit ? limit : scaled;
}

// Of a bias and one by distance in log2 units: finite ones stay finite in sum, and either one's minus infinity hides
// the place.
template <class T>
DEVICE T sum_of_biases(T a, T b) {
  constexpr T limit = std::numeric_limits<T>::max();
  const T sum = a + b, largest = sum < -limit ? -limit : sum > limit ? limit : sum;
  if (a == -kInfinity<T> || b == -kInfinity<T>) return -kInfinity<T>;
  return a - a == 0 && b - b == 0 ? largest : sum;  // both finite
}

// Calls f with a null pointer of the stored type, one of those that are computed in T.
template <class T, class F>
DEVICE void with_stored(Element element, F&& f) {
  if constexpr (std::is_same_v<T, double>)
    f(static_cast<double*>(nullptr));
  else if (element == Element::float32)
    f(static_cast<float*>(nullptr));
  else if (element == Element::bfloat16)
    f(static_cast<BFloat16*>(nullptr));
  else
    f(static_cast<Float16*>(nullptr));
}

// A bias may be float32 beside any other type.
template <class T>
DEVICE_APART T load_element(const Tensor4& x, Index offset) {
  T value{};
  with_element(x.element,
               [&]<class E>(E*) { value = convert<T>(device::load(static_cast<const E*>(x.data) + offset)); });
  return value;
}
template <class T>
DEVICE_APART void store_element(const Tensor4& x, Index offset, T value) {
  with_element(x.element, [&]<class E>(E*) { device::store(static_cast<E*>(x.data) + offset, convert<E>(value)); });
}

// One of the numbers behind a `void` pointer.
template <class T>
DEVICE T row_value(const void* rows, Index i) {
  return device::load(static_cast<const T*>(rows) + i);
}
template <class T>
DEVICE void put_row_value(void* rows, Index i, T x) {
  device::store(static_cast<T*>(rows) + i, x);
}

// Bit n: whether element n of a bias, `step` apart, is minus infinity; of 32 at most.
DEVICE_APART uint32_t hidden_by(const Tensor4& bias, Index offset, Index step, int count) {
  uint32_t bits = 0;
  with_element(bias.element, [&]<class E>(E*) {
    using T = std::conditional_t<std::is_same_v<E, double>, double, float>;
    const E* data = static_cast<const E*>(bias.data) + offset;
#pragma unroll 4
    for (int n = 0; n < count; ++n) bits |= uint32_t(convert<T>(device::load(data + n * step)) == -kInfinity<T>) << n;
  });
  return bits;
}

// The matrix of one batch and head, from some row on.
struct Rows {
  const Tensor4* of;
  Index offset, count;  // rows from here to the last

  DEVICE Rows(const Tensor4& x, Index b, Index h, Index row)
      : of(&x), offset(b * x.strides[0] + h * x.strides[1] + row * x.strides[2]), count(x.sizes[2] - row) {}

  // Of stored type E.
  template <class E>
  DEVICE const E* pointer(Index row, Index column) const {
    return static_cast<const E*>(of->data) + offset + row * of->strides[2] + column * of->strides[3];
  }
  // Rows before the first, and rows and columns past the last, are zero.
  template <class E>
  DEVICE E at(Index row, Index column) const {
    const bool there = row < count && row >= count - of->sizes[2] && column < of->sizes[3];
    return there ? device::load(pointer<E>(row, column)) : E{};
  }
  // In the type of computation; `row` is one of them.
  template <class T>
  DEVICE T get(Index row, Index column) const {
    return load_element<T>(*of, offset + row * of->strides[2] + column * of->strides[3]);
  }
  template <class T>
  DEVICE void put(Index row, Index column, T value) const {
    if (row < count && column < of->sizes[3])
      store_element(*of, offset + row * of->strides[2] + column * of->strides[3], value);
  }
};

DEVICE bool nothing_to_do(const Problem& p) {
  return p.only_if && device::load(p.only_if) == 0;
}

// One batch and query head.
struct Site {
  const Problem& of;
  Index b, h;
  bool asks_bias = true;  // whether the bits of a tile know where a bias hides places

  DEVICE Rows q(Index row) const { return queries_of(of.q, row); }
  DEVICE Rows k(Index row) const { return keys_of(of.k, row); }
  DEVICE Rows v(Index row) const { return keys_of(of.v, row); }
  // Of any tensor with a row for each query, or for each key.
  DEVICE Rows queries_of(const Tensor4& x, Index row) const { return {x, b, h, row}; }
  DEVICE Rows keys_of(const Tensor4& x, Index row) const { return {x, b, h / of.group(), row}; }
  // In log2 units; a finite one stays finite.
  template <class T>
  DEVICE T sink() const {
    return of.sinks ? in_log2_units(device::load(static_cast<const T*>(of.sinks) + h)) : -kInfinity<T>;
  }
  DEVICE Index row_of(Index i) const { return (b * of.heads + h) * of.queries + i; }  // in lse and its like

  // How much of a tile is visible, from its first row and key and their numbers on.
  DEVICE_APART Cover cover(Index row, Index rows, Index key, Index keys) const {
    const Index last_row = (row + rows < of.queries ? row + rows : of.queries) - 1;
    const Index last_key = (key + keys < of.keys ? key + keys : of.keys) - 1;
    Tile tile{nullptr, int(last_row - row + 1), int32_t(row), int32_t(last_row), int32_t(key), int32_t(last_key)};
    if (of.true_rows) choose_rows(tile, row);
    const Cover cover = of.mask.cover(b, true_head(), tile);
    if (cover != Cover::all) return cover;
    // A bias may hide places; a tile that sticks out has places that are none.
    const bool pure = !(asks_bias && of.bias.defined()) && row + rows <= of.queries && key + keys <= of.keys;
    return pure && !distances_hide(row + rows - 1, key, rows + keys - 1) ? Cover::all : Cover::some;
  }

  DEVICE Index offset_in(const Tensor4& x, Index i, Index j) const {
    return b * x.strides[0] + h * x.strides[1] + i * x.strides[2] + j * x.strides[3];
  }
  DEVICE Index bias_offset(Index i, Index j) const { return offset_in(of.bias, i, j); }
  // Of row i and key j in a table by distance; and its rows from there on.
  DEVICE Index distance_offset(Index i, Index j) const {
    return b * of.distance.strides[0] + h * of.distance.strides[1] + (j - i + of.queries - 1) * of.distance.strides[2];
  }
  template <class T>
  DEVICE T distance_bias(Index i, Index j) const {  // in log2 units
    return in_log2_units(device::load(static_cast<const T*>(of.distance.data) + distance_offset(i, j)));
  }
  DEVICE Rows distances(const Tensor4& x, Index i, Index j) const { return {x, b, h, j - i + of.queries - 1}; }

  // Bit n: whether row i and key j + n are there and visible. A bias of minus infinity hides its place.
  DEVICE_APART uint32_t visible(Index i, Index j) const {
    if (i >= of.queries || j >= of.keys) return 0;
    const int count = of.keys - j < 32 ? int(of.keys - j) : 32;
    uint32_t bits = of.mask.visible(b, true_head(), true_row(i), int32_t(j), count);
    if (asks_bias && of.bias.defined()) bits &= ~hidden_by(of.bias, bias_offset(i, j), of.bias.strides[3], count);
    if (asks_bias && of.distance.defined())
      bits &= ~hidden_by(of.distance, distance_offset(i, j), of.distance.strides[2], count);
    return bits;
  }

  DEVICE DropoutStream dropout() const { return of.dropout.on() ? of.dropout.stream(b, h) : DropoutStream{}; }

 private:
  // Whether any of `count` biases by distance, from that of row i and key j on, is minus infinity.
  DEVICE bool distances_hide(Index i, Index j, Index count) const {
    if (!asks_bias || !of.distance.defined()) return false;
    for (Index n = 0; n < count; n += 32)
      if (hidden_by(of.distance, distance_offset(i, j + n), of.distance.strides[2],
                    count - n < 32 ? int(count - n) : 32))
        return true;
    return false;
  }

  DEVICE Index true_head() const { return of.true_heads ? device::load(of.true_heads + h) : h; }
  DEVICE int32_t true_row(Index i) const { return of.true_rows ? device::load(of.true_rows + i) : int32_t(i); }
  DEVICE void choose_rows(Tile& tile, Index row) const {
    tile.rows = of.true_rows + row;
    tile.first_row = tile.last_row = true_row(row);
    for (int n = 1; n < tile.queries; ++n) {
      const int32_t i = true_row(row + n);
      tile.first_row = i < tile.first_row ? i : tile.first_row, tile.last_row = i > tile.last_row ? i : tile.last_row;
    }
  }
};

// Bit n: whether dropout keeps row i and key j + n; j is a multiple of 8.
DEVICE_APART uint32_t kept_bits(const DropoutStream& stream, Index i, Index j) {
  uint32_t bits = 0;
  for (int group = 0; group < 4; ++group) {
    const Philox random = stream.eight(uint32_t(i), uint32_t(j / 8 + group));
    for (int n = 0; n < 8; ++n) bits |= uint32_t(stream.keeps(random, n)) << (8 * group + n);
  }
  return bits;
}

// Fills bits [rows][keys / 32] of a tile; the block's threads share the work.
template <int Threads, class F>
DEVICE void fill_bits(const device::Shared<uint32_t>& bits, int rows, int keys, F&& word) {
  for (int n = device::thread(); n < rows * (keys / 32); n += Threads)
    bits[n] = word(n / (keys / 32), n % (keys / 32) * 32);
}

}  // namespace attention_ops
