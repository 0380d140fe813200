// Tiles for tensor cores: swizzled in shared memory, copied in and out in sixteen bytes, and the two products a warp
// needs. Sums stay in registers as mma.sync leaves them: element e of acc[m][n] of a lane lies in row
// 16 m + lane / 4 + 8 (e / 2) and column 8 n + 2 (lane % 4) + e % 2.
#pragma once
#include "kernels/cuda/site.cuh"

namespace attention_ops {

// How a block works: each of its warps owns 16 * Blocks rows, and it takes Step rows of the other side at a time. Width
// is that of a tile in shared memory; rows may be narrower. Extra: with bias, softcap, dropout, sinks, or a scale that
// is not positive.
template <int Width, int Warps, int Blocks, int Step, bool Extra>
struct TensorShape {
  static constexpr int kWidth = Width, kBlocks = Blocks, kStep = Step, kThreads = 32 * Warps;
  static constexpr int kWarpRows = 16 * Blocks, kOwn = kWarpRows * Warps;
  static constexpr int kOwnBytes = kOwn * Width * 2, kStepBytes = Step * Width * 2;
  static constexpr bool kExtra = Extra;
};

struct TensorLane {
  int warp = device::thread() / 32, lane = device::thread() % 32;
  DEVICE int row(int e) const { return lane / 4 + e / 2 * 8; }
  DEVICE int column(int e) const { return lane % 4 * 2 + e % 2; }
};

// The rows of one batch and head, aligned to sixteen bytes.
template <class E>
struct AlignedRows {
  E* data;
  Index stride;
  int rows, width;

  DEVICE explicit AlignedRows(const Rows& x)
      : data(static_cast<E*>(x.of->data) + x.offset),
        stride(x.of->strides[2]),
        rows(int(x.count)),
        width(int(x.of->sizes[3])) {}
};

// The byte of sixteen-byte chunk c of a row. Chunks are permuted by row, so that eight rows read at one chunk column
// touch every bank once.
template <int Width>
DEVICE constexpr uint32_t tile_offset(int row, int c) {
  return row * (Width * 2) + ((c ^ (row & 7)) << 4);
}

// Begins to copy rows from `first` on into a tile; what lies past the last row or column becomes zero. A thread keeps
// one column of chunks and steps down the rows.
template <int Width, int Threads, int Count, class E>
DEVICE void copy_tile(uint32_t to, const AlignedRows<E>& from, int first) {
  constexpr int kChunks = Width / 8, kStride = Threads / kChunks;
  static_assert(Threads % kChunks == 0 && Count % kStride == 0);
  const int r = device::thread() / kChunks, c = device::thread() % kChunks;
  const E* data = from.data + Index(first + r) * from.stride + c * 8;
  const int left = c * 8 < from.width ? from.rows - first - r : 0;
#pragma unroll
  for (int i = 0; i < Count / kStride; ++i) {
    const bool valid = i * kStride < left;
    device::copy16(to + tile_offset<Width>(r + i * kStride, c), valid ? data + i * kStride * from.stride : from.data,
                   valid);
  }
}

// Raises the flag if a tile holds a NaN or an infinity: 0 times it is not 0, and hidden places may hold anything.
template <class E, int Threads>
DEVICE void check_finite(uint32_t tile, int bytes, int* inexact) {
  constexpr uint32_t kExponent = std::is_same_v<E, BFloat16> ? 0x7f80 : 0x7c00;
  bool finite = true;
  for (int n = device::thread() * 16; n < bytes; n += Threads * 16)
    for (const uint32_t word : device::load_shared16(tile + n).word)
      finite = finite && (word & kExponent) != kExponent && (word >> 16 & kExponent) != kExponent;
  if (!finite) device::raise(inexact);
}

template <int M, int N>
DEVICE void clear(float (&x)[M][N][4]) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n) x[m][n][0] = x[m][n][1] = x[m][n][2] = x[m][n][3] = 0;
}

// A lane's address of chunk c is its address of chunk 0 with the bits of c flipped: tiles are aligned, so only bits of
// the swizzle are touched. Rows sixteen apart differ by a constant.
template <int Width>
DEVICE uint32_t left_operand(uint32_t tile, int row, int lane) {
  return tile + tile_offset<Width>(row + lane % 16, lane / 16);
}

template <int Width, int M>
struct HeldOperand {
  uint32_t fragments[Width / 16][M][4];

  DEVICE void load(uint32_t address) {
#pragma unroll
    for (int k = 0; k < Width / 16; ++k)
#pragma unroll
      for (int m = 0; m < M; ++m) device::load_matrices<false>(fragments[k][m], (address ^ (k << 5)) + m * 32 * Width);
  }
};

// acc [16 M, 8 N] += a [16 M, Width] b', b [8 N, Width]; the fragments of a from `left(k, m, fragment)`.
template <class E, int Width, int M, int N, class Left>
DEVICE void multiply_transposed(float (&acc)[M][N][4], Left&& left, uint32_t b, int lane) {
  const uint32_t b0 = b + tile_offset<Width>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
  for (int k = 0; k < Width / 16; ++k) {
    uint32_t a[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) left(k, m, a[m]);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      uint32_t right[4];
      device::load_matrices<false>(right, (b0 ^ (k << 5)) + n * 16 * Width);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        device::multiply_add<E>(acc[m][n], a[m], right[0], right[1]);
        device::multiply_add<E>(acc[m][n + 1], a[m], right[2], right[3]);
      }
    }
  }
}
// The same with a in shared memory, at the address of `left_operand`.
template <class E, int Width, int M, int N>
DEVICE void multiply_transposed(float (&acc)[M][N][4], uint32_t a, uint32_t b, int lane) {
  multiply_transposed<E, Width>(
      acc,
      [&](int k, int m, uint32_t (&fragment)[4]) {
        device::load_matrices<false>(fragment, (a ^ (k << 5)) + m * 32 * Width);
      },
      b, lane);
}

// acc [16 M, Width] += w [16 M, 8 N] b, b [8 N, Width] in shared memory. Sums as they lie are the next left operand.
template <class E, int Width, int M, int N>
DEVICE void multiply(float (&acc)[M][Width / 8][4], const float (&w)[M][N][4], uint32_t b, int lane) {
  uint32_t a[N / 2][M][4];  // packed first: half the registers from here on
#pragma unroll
  for (int k = 0; k < N / 2; ++k)
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[k][m][i] = device::pack<E>(w[m][2 * k + i / 2][i % 2 * 2], w[m][2 * k + i / 2][i % 2 * 2 + 1]);
  const uint32_t b0 = b + tile_offset<Width>(lane % 16, lane / 16);
#pragma unroll
  for (int k = 0; k < N / 2; ++k)
#pragma unroll
    for (int d = 0; d < Width / 8; d += 2) {
      uint32_t right[4];
      device::load_matrices<true>(right, (b0 ^ (d << 4)) + k * 32 * Width);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        device::multiply_add<E>(acc[m][d], a[k][m], right[0], right[1]);
        device::multiply_add<E>(acc[m][d + 1], a[k][m], right[2], right[3]);
      }
    }
}

// Writes a warp's sums, each row times its factor, through the warp's own rows of a tile, sixteen bytes a lane.
template <class E, int Width, int M>
DEVICE void store_rows(uint32_t tile, int warp_row, int lane, const float (&acc)[M][Width / 8][4],
                       const float (&factor)[2 * M], const AlignedRows<E>& to, int first) {
  device::sync_warp();  // the tile may just have been read
#pragma unroll
  for (int h = 0; h < 2 * M; ++h)
#pragma unroll
    for (int d = 0; d < Width / 8; ++d)
      device::store_shared(
          tile + tile_offset<Width>(warp_row + h * 8 + lane / 4, d) + lane % 4 * 4,
          device::pack<E>(acc[h / 2][d][h % 2 * 2] * factor[h], acc[h / 2][d][h % 2 * 2 + 1] * factor[h]));
  device::sync_warp();
#pragma unroll
  for (int n = lane; n < 16 * M * (Width / 8); n += 32) {
    const int r = warp_row + n / (Width / 8), c = n % (Width / 8);
    if (first + r < to.rows && c * 8 < to.width)
      device::store16(to.data + Index(first + r) * to.stride + c * 8,
                      device::load_shared16(tile + tile_offset<Width>(r, c)));
  }
}

// Calls f(m, n, e) where the bits of a tile are not set. Bits are [query][Words], a bit for each key; queries are the
// tile's rows, or, Transposed, its columns. The warp's rows begin at `first`.
template <bool Transposed, int Words, int M, int N, class F>
DEVICE void each_unset(const device::Shared<uint32_t>& bits, int first, F&& f) {
  const TensorLane t;
  uint32_t word = 0;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int e = 0; e < 4; ++e)
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const int row = first + 16 * m;
        bool set;
        if constexpr (Transposed) {
          word = bits[(n * 8 + t.column(e)) * Words + row / 32];
          set = word >> (row % 32 + t.row(e)) & 1;
        } else {
          if (n % 4 == 0) word = bits[(row + t.row(e)) * Words + n / 4] >> t.column(e);
          set = word >> (n % 4 * 8) & 1;
        }
        if (!set) f(m, n, e);
      }
}

// Calls f(m, n, e) for every element.
template <int M, int N, class F>
DEVICE void each_element(F&& f) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) f(m, n, e);
}

// --- scores ---

// tanh to seven digits of 1.
DEVICE float tanh_fast(float x) {
  return 1 - 2 * device::reciprocal_fast(device::exp2_fast(x * (2 * kLog2e<float>)) + 1);
}

struct QueryKey {
  int query, key;
};

// A tile of scores that a block works on: its first query and key, whether the bits say what is visible, and whether
// weights are dropped. Rows of the tile are queries, or, Transposed, keys; those of the warp begin at `warp_row`.
struct TensorTile {
  const Site& site;
  int query, key, warp_row;
  bool some, drops;

  // The place of the lane's first element.
  template <bool Transposed>
  DEVICE QueryKey place() const {
    const int row = warp_row + TensorLane().row(0), column = TensorLane().column(0);
    return {query + (Transposed ? column : row), key + (Transposed ? row : column)};
  }
  // How far element e of block m, n is from there, which every lane knows alike.
  template <bool Transposed>
  DEVICE static constexpr QueryKey step(int m, int n, int e) {
    const int row = m * 16 + e / 2 * 8, column = n * 8 + e % 2;
    return {Transposed ? column : row, Transposed ? row : column};
  }
};

// Products times this are scores in log2 units; in blocks with extras `finish_scores` has put them there.
template <class S>
DEVICE float score_unit(const Problem& p) {
  return S::kExtra ? 1 : float(p.scale * kLog2e<double>);
}

// x := the lane's elements of a tile of biases, in log2 units: `first` is the offset of the lane's first one, a step
// down the queries and one along the keys are `down` and `along`. Past the ends, which the tile's bits hide, it is some
// bias, so that no load depends on a branch.
template <bool Transposed, class B, int M, int N>
DEVICE void gather(float (&x)[M][N][4], const TensorTile& tile, const void* data, Index first, Index down,
                   Index along) {
  const QueryKey place = tile.place<Transposed>();
  const QueryKey left{int(tile.site.of.queries) - place.query, int(tile.site.of.keys) - place.key};
  each_element<M, N>([&](int m, int n, int e) {
    const QueryKey at = tile.step<Transposed>(m, n, e);
    const Index offset = first + at.query * down + at.key * along;
    const bool there = at.query < left.query && at.key < left.key;
    x[m][n][e] = in_log2_units(float(device::load(static_cast<const B*>(data) + (there ? offset : 0))));
  });
}

// A bias of type B, one by distance, or both. hidden(m, n, e) is told where minus infinity hides a place.
template <bool Transposed, class B, int M, int N, class Hidden>
DEVICE void add_bias(float (&s)[M][N][4], const TensorTile& tile, Hidden&& hidden) {
  const Problem& p = tile.site.of;
  const QueryKey place = tile.place<Transposed>();
  float x[M][N][4];
  clear(x);
  if (p.bias.defined())
    gather<Transposed, B>(x, tile, p.bias.data, tile.site.bias_offset(place.query, place.key), p.bias.strides[2],
                          p.bias.strides[3]);
  if (p.distance.defined()) {
    float y[M][N][4];
    gather<Transposed, float>(y, tile, p.distance.data, tile.site.distance_offset(place.query, place.key),
                              -p.distance.strides[2], p.distance.strides[2]);
    each_element<M, N>([&](int m, int n, int e) { x[m][n][e] = sum_of_biases(x[m][n][e], y[m][n][e]); });
  }
  each_element<M, N>([&](int m, int n, int e) {
    if (x[m][n][e] == -kInfinity<float>) {
      s[m][n][e] = x[m][n][e];
      hidden(m, n, e);
    } else {
      s[m][n][e] += x[m][n][e];
    }
  });
}

// s := scores in log2 units, and the slope of the softcap where there is one.
template <bool Transposed, class E, int M, int N, class Hidden>
DEVICE void finish_scores(float (&s)[M][N][4], float (&slope)[M][N][4], const TensorTile& tile, Hidden&& hidden) {
  const Problem& p = tile.site.of;
  const float unit = float(p.softcap * kLog2e<double>), factor = float(p.product_scale);
  if (p.softcap > 0)
    each_element<M, N>([&](int m, int n, int e) {
      const float x = tanh_fast(s[m][n][e] * factor);
      slope[m][n][e] = 1 - x * x, s[m][n][e] = device::multiply(unit, x);
    });
  else
    each_element<M, N>(
        [&](int m, int n, int e) { s[m][n][e] = device::multiply(s[m][n][e], float(p.scale * kLog2e<double>)); });
  if (!p.adds()) return;
  if (p.bias.element == Element::float32)
    add_bias<Transposed, float>(s, tile, hidden);
  else
    add_bias<Transposed, E>(s, tile, hidden);
}

// The bits of a tile, where it needs any; they are words, so fewer than 32 keys are a word too. Ends with a barrier if
// there are some.
template <int Threads, class Memory>
DEVICE void fill_tile_bits(const Memory& memory, const TensorTile& tile, const DropoutStream& stream, int queries,
                           int keys) {
  const int whole = (keys + 31) / 32 * 32;
  if (tile.some)
    fill_bits<Threads>(memory.visible, queries, whole,
                       [&](int i, int j) { return tile.site.visible(tile.query + i, tile.key + j); });
  if (tile.drops)
    fill_bits<Threads>(memory.kept, queries, whole,
                       [&](int i, int j) { return kept_bits(stream, tile.query + i, tile.key + j); });
  if (tile.some || tile.drops) device::sync_threads();
}

}  // namespace attention_ops
