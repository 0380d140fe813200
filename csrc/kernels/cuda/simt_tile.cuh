// Tiles of 64 queries and 64 keys in plain arithmetic: the two products that attention needs, for any width. A thread
// owns rows ty + 16 r and columns tx + 16 c of a tile, r and c from 0 to 3.
#pragma once
#include "kernels/cuda/site.cuh"

namespace attention_ops {

struct SimtThread {
  int ty = device::thread() / 16, tx = device::thread() % 16;
  DEVICE int row(int r) const { return ty + 16 * r; }
  DEVICE int column(int c) const { return tx + 16 * c; }
};

template <class T>
using SimtValues = T[4][4];

template <class T>
DEVICE void clear(SimtValues<T>& x) {
  for (auto& row : x)
    for (T& e : row) e = 0;
}
template <class T>
DEVICE void copy(SimtValues<T>& to, const SimtValues<T>& from) {
  for (int r = 0; r < 4; ++r)
    for (int c = 0; c < 4; ++c) to[r][c] = from[r][c];
}

// Sum and maximum over the threads that hold a row: sixteen, or those of a warp.
template <int Threads = 16, class T>
DEVICE T row_sum(T x) {
  for (int n = Threads / 2; n > 0; n /= 2) x += device::shuffle_xor(x, n);
  return x;
}
template <int Threads = 16, class T>
DEVICE T row_max(T x) {
  for (int n = Threads / 2; n > 0; n /= 2) {
    const T other = device::shuffle_xor(x, n);
    x = other > x ? other : x;
  }
  return x;
}

// A block's shared memory: two slices of operands, a tile of weights, and the tile's bits.
template <class T>
struct SimtMemory {
  static constexpr int kDepth = 32,
                       kStride = kSimtTile + 1;  // one more, against bank conflicts
  static constexpr int kSlice = kDepth * kStride * int(sizeof(T)), kWeights = kSimtTile * kStride * int(sizeof(T));
  static constexpr int kWords = kSimtTile / 32, kBits = kSimtTile * kWords * 4;
  static constexpr int kBytes = 2 * kSlice + kWeights + 2 * kBits;

  device::Shared<T> a = device::shared<T>(0), b = device::shared<T>(kSlice);  // [kDepth, kStride]
  device::Shared<T> weights = device::shared<T>(2 * kSlice);                  // [query, key] at kStride
  device::Shared<uint32_t> visible = device::shared<uint32_t>(2 * kSlice + kWeights);
  device::Shared<uint32_t> kept = device::shared<uint32_t>(2 * kSlice + kWeights + kBits);  // [query, kWords]

  static DEVICE bool bit(const device::Shared<uint32_t>& bits, int query, int key) {
    return bits[query * kWords + key / 32] >> (key % 32) & 1;
  }
};

// How many blocks of a multiprocessor find registers.
template <class T>
constexpr int kSimtBlocks = sizeof(T) == 4 ? 2 : 1;

// A slice of an operand: from where it is read, and how it then lies, rows and columns how far apart. It has a power of
// two of columns, of which each thread takes one.
struct Slice {
  int row;
  Index column;
  int rows, log2_columns, row_step, column_step;
};

template <class T>
DEVICE_APART void stage(const Rows& from, Slice slice, device::Shared<T> to) {
  const int row = device::thread() >> slice.log2_columns, step = kSimtThreads >> slice.log2_columns;
  const int column = device::thread() - (row << slice.log2_columns);
  with_stored<T>(from.of->element, [&]<class E>(E*) {
#pragma unroll 8
    for (int n = row; n < slice.rows; n += step)
      to[n * slice.row_step + column * slice.column_step] =
          convert<T>(from.at<E>(slice.row + n, slice.column + column));
  });
}

// Calls f for 0 .. count - 1, at most Depth; a loop of fixed length unrolls.
template <int Depth, class F>
DEVICE void each_slice(Index count, F&& f) {
  if (count < Depth) {
    for (int n = 0; n < int(count); ++n) f(n);
    return;
  }
#pragma unroll 8
  for (int n = 0; n < Depth; ++n) f(n);
}

// sum[r][c] += sum_d a(row, d) b(column, d)
template <class T>
DEVICE_APART void multiply_rows(SimtValues<T>& sum, const Rows& a, const Rows& b, Index depth) {
  constexpr int kDepth = SimtMemory<T>::kDepth, kStride = SimtMemory<T>::kStride;
  const SimtMemory<T> m;
  const SimtThread t;
  SimtValues<T> acc;
  copy(acc, sum);
  for (Index first = 0; first < depth; first += kDepth) {
    device::sync_threads();
    stage(a, {0, first, kSimtTile, 5, 1, kStride}, m.a);
    stage(b, {0, first, kSimtTile, 5, 1, kStride}, m.b);
    device::sync_threads();
    each_slice<kDepth>(depth - first, [&](int d) {
      T x[4], y[4];
      for (int r = 0; r < 4; ++r) x[r] = m.a[d * kStride + t.row(r)], y[r] = m.b[d * kStride + t.column(r)];
      for (int r = 0; r < 4; ++r)
        for (int c = 0; c < 4; ++c) acc[r][c] += x[r] * y[c];
    });
  }
  copy(sum, acc);
}

constexpr int kDiagonals = 2 * kSimtTile - 1;  // of a tile: one for each of its distances

// sum[r][c] += sum_d a(row, d) b(column - row + 63, first + d), for rows b by distance, from that of the tile's last
// query and first key on.
template <class T>
DEVICE_APART void multiply_diagonals(SimtValues<T>& sum, const Rows& a, const Rows& b, Index first, Index depth) {
  constexpr int kDepth = SimtMemory<T>::kDepth / 2, kStride = SimtMemory<T>::kStride, kWide = 2 * kStride;
  const SimtMemory<T> m;
  const SimtThread t;
  SimtValues<T> acc;
  copy(acc, sum);
  for (Index from = 0; from < depth; from += kDepth) {
    device::sync_threads();
    stage(a, {0, from, kSimtTile, 4, 1, kStride}, m.a);
    stage(b, {0, first + from, kDiagonals, 4, 1, kWide}, m.b);
    device::sync_threads();
    each_slice<kDepth>(depth - from, [&](int d) {
      T x[4], y[7];
      for (int r = 0; r < 4; ++r) x[r] = m.a[d * kStride + t.row(r)];
      for (int n = 0; n < 7; ++n) y[n] = m.b[d * kWide + t.tx - t.ty + 15 + 16 * n];
      for (int r = 0; r < 4; ++r)
        for (int c = 0; c < 4; ++c) acc[r][c] += x[r] * y[3 + c - r];
    });
  }
  copy(sum, acc);
}

// A place of a tile of weights.
struct Cell {
  int query, key;
};

// sum[r][c] += sum_n weights(cell(row, n)) x(n, first + column) over the first rows of x. Hidden places may hold
// anything, and 0 times it is NaN: where some are, only visible pairs are multiplied. Where cells may lie outside of
// the tile's keys, those that do are left out.
template <bool Outside, class T, class CellOf>
DEVICE void multiply_cells(SimtValues<T>& sum, const Rows& x, int rows, Index first, bool some, CellOf&& cell_of) {
  constexpr int kDepth = SimtMemory<T>::kDepth, kStride = SimtMemory<T>::kStride;
  const SimtMemory<T> m;
  const SimtThread t;
  SimtValues<T> acc;
  copy(acc, sum);
  for (int from = 0; from < rows; from += kDepth) {
    device::sync_threads();
    stage(x, {from, first, kDepth, 6, kStride, 1}, m.b);
    device::sync_threads();
    const auto add = [&](int n, bool some) {
      T y[4];
      for (int c = 0; c < 4; ++c) y[c] = m.b[n * kStride + t.column(c)];
      for (int r = 0; r < 4; ++r) {
        const Cell cell = cell_of(t.row(r), from + n);
        if (Outside && (cell.key < 0 || cell.key >= kSimtTile)) continue;
        if (some && !m.bit(m.visible, cell.query, cell.key)) continue;
        const T w = m.weights[cell.query * kStride + cell.key];
        for (int c = 0; c < 4; ++c) acc[r][c] += w * y[c];
      }
    };
    if (Outside || some)
      for (int n = 0; n < kDepth && n < rows - from; ++n) add(n, some);
    else
      each_slice<kDepth>(rows - from, [&](int n) { add(n, false); });
  }
  copy(sum, acc);
}

// The first rows of a tile, at most all of its.
DEVICE int rows_in_tile(const Rows& x) {
  return x.count < kSimtTile ? int(x.count) : kSimtTile;
}

// acc[r][c] += sum_n weights(row, n) x(n, first + column), or, Transposed, sum_n weights(n, row) x(n, first + column).
template <bool Transposed, class T>
DEVICE_APART void multiply_columns(SimtValues<T>& acc, const Rows& x, Index first, bool some) {
  multiply_cells<false>(acc, x, rows_in_tile(x), first, some,
                        [](int own, int n) { return Transposed ? Cell{n, own} : Cell{own, n}; });
}

// Lays a thread's places where multiply_cells reads them.
template <class T>
DEVICE void put_weights(const SimtMemory<T>& m, const SimtValues<T>& x) {
  const SimtThread t;
  device::sync_threads();
  for (int r = 0; r < 4; ++r)
    for (int c = 0; c < 4; ++c) m.weights[t.row(r) * m.kStride + t.column(c)] = x[r][c];
}

// What is added to the score of a place, in log2 units.
template <class T>
DEVICE_APART T added(const Site& site, Index i, Index j) {
  const Problem& p = site.of;
  T sum = 0;
  if (p.bias.defined()) sum = in_log2_units(load_element<T>(p.bias, site.bias_offset(i, j)));
  if (p.distance.defined()) sum = sum_of_biases(sum, site.template distance_bias<T>(i, j));
  return sum;
}

// From a product to a score in log2 units, minus infinity where hidden, and the softcap's tanh. Every kernel rounds it
// alike: one score is taken from another.
template <class T>
DEVICE void finish_score(T& s, T& tanh, bool visible, const Site& site, Index i, Index j) {
  const Problem& p = site.of;
  tanh = 0;
  if (!visible) {
    s = -kInfinity<T>;
    return;
  }
  if (p.softcap > 0) {
    tanh = device::tanh(s * T(p.product_scale));
    s = device::multiply(tanh, T(p.softcap * kLog2e<double>));
  } else {
    s = device::multiply(s, T(p.scale * kLog2e<double>));
  }
  if (p.adds()) s += added<T>(site, i, j);
}

// acc[r][c] += x(row) rows(column - row)', for columns of rows by distance beside a tile. Either tensor may be none.
template <class T>
DEVICE void multiply_distances(SimtValues<T>& acc, const Site& site, Index query, Index key, const Tensor4& x,
                               const Tensor4& distance, const DistanceColumns& columns) {
  if (columns.count == 0 || !x.defined() || !distance.defined()) return;
  multiply_diagonals(acc, site.queries_of(x, query), site.distances(distance, query + kSimtTile - 1, key),
                     columns.first, columns.count);
}

// acc[r][c] += sum_n weights(row, n) x(n - row, first + column), for rows x by distance.
template <class T>
DEVICE_APART void multiply_band(SimtValues<T>& acc, const Rows& x, Index first, bool some) {
  multiply_cells<true>(acc, x, kDiagonals, first, some,
                       [](int own, int n) { return Cell{own, own + n - (kSimtTile - 1)}; });
}

// The same for the 64 columns of a part. There may be none.
template <class T>
DEVICE void add_distances(SimtValues<T>& acc, const Site& site, Index query, Index key, const Tensor4& distance,
                          const DistanceColumns& columns, Index part, bool some) {
  if (columns.count == 0 || !distance.defined()) return;
  multiply_band(acc, site.distances(distance, query + kSimtTile - 1, key), columns.first + part * kSimtTile, some);
}

// One tile of the score matrix as a thread holds it.
template <class T>
struct SimtScores {
  Index query, key;  // the tile's first row and key
  bool some;         // the bits say what is visible
  SimtValues<T> s, tanh;

  DEVICE T slope(int r, int c) const { return T(1) - tanh[r][c] * tanh[r][c]; }  // of the softcap

  DEVICE bool sees(const SimtMemory<T>& m, int r, int c) const {
    const SimtThread t;
    return !some || m.bit(m.visible, t.row(r), t.column(c));
  }
  DEVICE bool keeps(const SimtMemory<T>& m, int r, int c) const {
    const SimtThread t;
    return m.bit(m.kept, t.row(r), t.column(c));
  }

  // Every pass computes scores here.
  DEVICE_APART void compute(const Site& site, Index first_query, Index first_key, bool whole) {
    const SimtMemory<T> m;
    const Problem& p = site.of;
    query = first_query, key = first_key, some = !whole;
    device::sync_threads();  // the last tile's readers are done
    if (some)
      fill_bits<kSimtThreads>(m.visible, kSimtTile, kSimtTile,
                              [&](int i, int j) { return site.visible(query + i, key + j); });
    if (const DropoutStream stream = site.dropout(); p.dropout.on())
      fill_bits<kSimtThreads>(m.kept, kSimtTile, kSimtTile,
                              [&](int i, int j) { return kept_bits(stream, query + i, key + j); });
    device::sync_threads();
    clear(s);
    multiply_rows(s, site.q(query), site.k(key), p.width);
    multiply_distances(s, site, query, key, p.q, p.distance, p.key_columns());
    const SimtThread t;
    for (int r = 0; r < 4; ++r)
      for (int c = 0; c < 4; ++c)
        finish_score(s[r][c], tanh[r][c], sees(m, r, c), site, query + t.row(r), key + t.column(c));
  }
};

// What dropout makes of a number at a place of a tile.
template <class T>
struct SimtDropout {
  const SimtMemory<T>& m;
  const SimtScores<T>& tile;
  bool on;
  T factor;

  DEVICE SimtDropout(const SimtMemory<T>& m, const SimtScores<T>& tile, const Problem& p)
      : m(m), tile(tile), on(p.dropout.on()), factor(p.dropout.scale) {}
  DEVICE T operator()(T x, int r, int c) const { return !on ? x : tile.keeps(m, r, c) ? factor * x : T(0); }
  DEVICE void apply(SimtValues<T>& x) const {
    for (int r = 0; r < 4; ++r)
      for (int c = 0; c < 4; ++c) x[r][c] = (*this)(x[r][c], r, c);
  }
};

// Calls f(score tile) for the tiles of some queries that have a visible key.
template <class T, class F>
DEVICE void each_key_tile(const Site& site, Index query, F&& f) {
  const auto cover = [&](int n) { return site.cover(query, kSimtTile, Index(n) * kSimtTile, kSimtTile); };
  SimtScores<T> tile;
  const int count = int((site.of.keys + kSimtTile - 1) / kSimtTile);
  for (VisibleTiles tiles(count, cover); !tiles.done(); tiles.next()) {
    tile.compute(site, query, Index(tiles.tile()) * kSimtTile, tiles.whole());
    f(tile);
  }
}

// Calls f(score tile) for the tiles of some keys that have a query which sees one.
template <class T, class F>
DEVICE void each_query_tile(const Site& site, Index key, F&& f) {
  const auto cover = [&](int n) { return site.cover(Index(n) * kSimtTile, kSimtTile, key, kSimtTile); };
  SimtScores<T> tile;
  const int count = int((site.of.queries + kSimtTile - 1) / kSimtTile);
  for (VisibleTiles tiles(count, cover); !tiles.done(); tiles.next()) {
    tile.compute(site, Index(tiles.tile()) * kSimtTile, key, tiles.whole());
    f(tile);
  }
}

}  // namespace attention_ops
