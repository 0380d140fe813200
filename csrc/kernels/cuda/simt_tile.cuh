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

// Where an element of a slice comes from, and where it goes.
struct Place {
  int row;
  Index column;
  int to;
};

template <class T, int Count = SimtMemory<T>::kDepth * kSimtTile, class PlaceOf>
DEVICE void stage(const Rows& from, PlaceOf&& place_of, const device::Shared<T>& to) {
  with_stored<T>(from.of->element, [&]<class E>(E*) {
    for (int n = device::thread(); n < Count; n += kSimtThreads) {
      const Place place = place_of(n);
      to[place.to] = convert<T>(from.at<E>(place.row, place.column));
    }
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

// acc[r][c] += sum_d a(row, d) b(column, d)
template <class T>
DEVICE void multiply_rows(SimtValues<T>& acc, const SimtMemory<T>& m, const Rows& a, const Rows& b, Index depth) {
  constexpr int kDepth = SimtMemory<T>::kDepth, kStride = SimtMemory<T>::kStride;
  const SimtThread t;
  for (Index first = 0; first < depth; first += kDepth) {
    device::sync_threads();
    stage(a, [&](int n) { return Place{n / kDepth, first + n % kDepth, n % kDepth * kStride + n / kDepth}; }, m.a);
    stage(b, [&](int n) { return Place{n / kDepth, first + n % kDepth, n % kDepth * kStride + n / kDepth}; }, m.b);
    device::sync_threads();
    each_slice<kDepth>(depth - first, [&](int d) {
      T x[4], y[4];
      for (int r = 0; r < 4; ++r) x[r] = m.a[d * kStride + t.row(r)], y[r] = m.b[d * kStride + t.column(r)];
      for (int r = 0; r < 4; ++r)
        for (int c = 0; c < 4; ++c) acc[r][c] += x[r] * y[c];
    });
  }
}

constexpr int kDiagonals = 2 * kSimtTile - 1;  // of a tile: one for each of its distances

// acc[r][c] += sum_d a(row, d) b(column - row + 63, first + d), for rows b by distance, from that of the tile's last
// query and first key on.
template <class T>
DEVICE void multiply_diagonals(SimtValues<T>& acc, const SimtMemory<T>& m, const Rows& a, const Rows& b, Index first,
                               Index depth) {
  constexpr int kDepth = SimtMemory<T>::kDepth / 2, kStride = SimtMemory<T>::kStride, kWide = 2 * kStride;
  const SimtThread t;
  for (Index from = 0; from < depth; from += kDepth) {
    const auto place = [&](int n, Index column, int stride) {
      return Place{n / kDepth, column + n % kDepth, n % kDepth * stride + n / kDepth};
    };
    device::sync_threads();
    stage<T, kDepth * kSimtTile>(a, [&](int n) { return place(n, from, kStride); }, m.a);
    stage<T, kDepth * kDiagonals>(b, [&](int n) { return place(n, first + from, kWide); }, m.b);
    device::sync_threads();
    each_slice<kDepth>(depth - from, [&](int d) {
      T x[4], y[7];
      for (int r = 0; r < 4; ++r) x[r] = m.a[d * kStride + t.row(r)];
      for (int n = 0; n < 7; ++n) y[n] = m.b[d * kWide + t.tx - t.ty + 15 + 16 * n];
      for (int r = 0; r < 4; ++r)
        for (int c = 0; c < 4; ++c) acc[r][c] += x[r] * y[3 + c - r];
    });
  }
}

// A place of a tile of weights.
struct Cell {
  int query, key;
};

// acc[r][c] += sum_n weights(cell(row, n)) x(n, first + column) over the first rows of x. Hidden places may hold
// anything, and 0 times it is NaN: where some are, only visible pairs are multiplied. Where cells may lie outside of
// the tile's keys, those that do are left out.
template <bool Outside, class T, class CellOf>
DEVICE void multiply_cells(SimtValues<T>& acc, const SimtMemory<T>& m, const Rows& x, int rows, Index first, bool some,
                           CellOf&& cell_of) {
  constexpr int kDepth = SimtMemory<T>::kDepth, kStride = SimtMemory<T>::kStride;
  const SimtThread t;
  for (int from = 0; from < rows; from += kDepth) {
    device::sync_threads();
    stage(
        x,
        [&](int n) {
          return Place{from + n / kSimtTile, first + n % kSimtTile, n / kSimtTile * kStride + n % kSimtTile};
        },
        m.b);
    device::sync_threads();
    const auto add = [&]<bool Some>(int n) {
      T y[4];
      for (int c = 0; c < 4; ++c) y[c] = m.b[n * kStride + t.column(c)];
      for (int r = 0; r < 4; ++r) {
        const Cell cell = cell_of(t.row(r), from + n);
        if (Outside && (cell.key < 0 || cell.key >= kSimtTile)) continue;
        if (Some && !m.bit(m.visible, cell.query, cell.key)) continue;
        const T w = m.weights[cell.query * kStride + cell.key];
        for (int c = 0; c < 4; ++c) acc[r][c] += w * y[c];
      }
    };
    if (some)
      each_slice<kDepth>(rows - from, [&](int n) { add.template operator()<true>(n); });
    else
      each_slice<kDepth>(rows - from, [&](int n) { add.template operator()<false>(n); });
  }
}

// The first rows of a tile, at most all of its.
DEVICE int rows_in_tile(const Rows& x) {
  return x.count < kSimtTile ? int(x.count) : kSimtTile;
}

// acc[r][c] += sum_n weights(row, n) x(n, first + column), or, Transposed, sum_n weights(n, row) x(n, first + column).
template <bool Transposed, class T>
DEVICE void multiply_columns(SimtValues<T>& acc, const SimtMemory<T>& m, const Rows& x, Index first, bool some) {
  multiply_cells<false>(acc, m, x, rows_in_tile(x), first, some,
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
DEVICE T added(const Site& site, Index i, Index j) {
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
    tanh = device::tanh(s * T(p.scale / p.softcap));
    s = device::multiply(tanh, T(p.softcap * kLog2e<double>));
  } else {
    s = device::multiply(s, T(p.scale * kLog2e<double>));
  }
  if (p.adds()) s += added<T>(site, i, j);
}

// acc[r][c] += x(row) rows(column - row)', for columns of rows by distance beside a tile. Either tensor may be none.
template <class T>
DEVICE void multiply_distances(SimtValues<T>& acc, const SimtMemory<T>& m, const Site& site, Index query, Index key,
                               const Tensor4& x, const Tensor4& distance, const DistanceColumns& columns) {
  if (!x.defined() || !distance.defined()) return;
  multiply_diagonals(acc, m, site.queries_of(x, query), site.distances(distance, query + kSimtTile - 1, key),
                     columns.first, columns.count);
}

// acc[r][c] += sum_n weights(row, n) rows(n - row, column), for the 64 columns of a part. There may be none.
template <class T>
DEVICE void add_distances(SimtValues<T>& acc, const SimtMemory<T>& m, const Site& site, Index query, Index key,
                          const Tensor4& distance, const DistanceColumns& columns, Index part, bool some) {
  if (columns.count == 0 || !distance.defined()) return;
  multiply_cells<true>(acc, m, site.distances(distance, query + kSimtTile - 1, key), kDiagonals,
                       columns.first + part * kSimtTile, some,
                       [](int own, int n) { return Cell{own, own + n - (kSimtTile - 1)}; });
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
  DEVICE void compute(const SimtMemory<T>& m, const Site& site, Index first_query, Index first_key, bool whole) {
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
    multiply_rows(s, m, site.q(query), site.k(key), p.width);
    multiply_distances(s, m, site, query, key, p.q, p.distance, p.key_columns());
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
      : m(m), tile(tile), on(p.dropout.on()), factor(p.dropout.scale()) {}
  DEVICE T operator()(T x, int r, int c) const { return !on ? x : tile.keeps(m, r, c) ? factor * x : T(0); }
  DEVICE void apply(SimtValues<T>& x) const {
    for (int r = 0; r < 4; ++r)
      for (int c = 0; c < 4; ++c) x[r][c] = (*this)(x[r][c], r, c);
  }
};

// Calls f(score tile) for the tiles of some queries that have a visible key.
template <class T, class F>
DEVICE void each_key_tile(const SimtMemory<T>& m, const Site& site, Index query, F&& f) {
  const auto cover = [&](int n) { return site.cover(query, kSimtTile, Index(n) * kSimtTile, kSimtTile); };
  SimtScores<T> tile;
  const int count = int((site.of.keys + kSimtTile - 1) / kSimtTile);
  for (VisibleTiles tiles(count, cover); !tiles.done(); tiles.next()) {
    tile.compute(m, site, query, Index(tiles.tile()) * kSimtTile, tiles.whole());
    f(tile);
  }
}

// Calls f(score tile) for the tiles of some keys that have a query which sees one.
template <class T, class F>
DEVICE void each_query_tile(const SimtMemory<T>& m, const Site& site, Index key, F&& f) {
  const auto cover = [&](int n) { return site.cover(Index(n) * kSimtTile, kSimtTile, key, kSimtTile); };
  SimtScores<T> tile;
  const int count = int((site.of.queries + kSimtTile - 1) / kSimtTile);
  for (VisibleTiles tiles(count, cover); !tiles.done(); tiles.next()) {
    tile.compute(m, site, Index(tiles.tile()) * kSimtTile, key, tiles.whole());
    f(tile);
  }
}

}  // namespace attention_ops
