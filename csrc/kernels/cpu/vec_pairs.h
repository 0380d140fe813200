// The vector vocabulary's second part: products of bfloat16 pairs, in vector registers or in a matrix unit.
#pragma once
#include <atomic>

#include "kernels/cpu/vec.h"

namespace attention_ops {

// Two bfloat16 numbers side by side in each lane, the first in the low half: products of that type multiply lane by
// lane and add both to a float.
using Pairs = Ints<float>;
using Halves = uint16_t __attribute__((vector_size(kVectorBytes / 2)));  // one half for each lane

inline Pairs load_pairs(const BFloat16* p) {
  Pairs x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline void store_pairs(BFloat16* p, Pairs x) {
  std::memcpy(p, &x, sizeof x);
}
inline Pairs splat_pair(const BFloat16* p) {
  int32_t x;
  std::memcpy(&x, p, sizeof x);
  return x - Pairs{};
}
template <class E>
inline Halves load_halves(const E* p, int n) {
  Halves x{};
  std::memcpy(&x, p, n * sizeof *p);
  return x;
}
// Zero for infinities and NaN.
inline Halves finite_part(Halves x) {
  return x & (Halves)((x & 0x7f80) != 0x7f80);
}
inline Pairs interleave(Halves first, Halves second) {
  return std::bit_cast<Pairs>(__builtin_convertvector(first, Words) | __builtin_convertvector(second, Words) << 16);
}

#if defined(__AVX512BF16__)
inline Vec<float> dot_pairs(Vec<float> sum, Pairs a, Pairs b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}
inline Halves round_halves(Vec<float> x) {
  return (Halves)_mm512_cvtneps_pbh(x);
}
inline Pairs round_pairs(Vec<float> first, Vec<float> second) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (Pairs)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}
#else
inline Vec<float> dot_pairs(Vec<float> sum, Pairs a, Pairs b) {
  const auto low = [](Pairs x) { return std::bit_cast<Vec<float>>(std::bit_cast<Words>(x) << 16); };
  const auto high = [](Pairs x) { return std::bit_cast<Vec<float>>(std::bit_cast<Words>(x) & 0xffff0000u); };
  return fma(high(a), high(b), fma(low(a), low(b), sum));
}
// Rounded to even, in the high half of each lane.
inline Words round_high(Vec<float> x) {
  const Words bits = std::bit_cast<Words>(x);
  return x == x ? bits + 0x7fff + ((bits >> 16) & 1) : bits | 0x400000;
}
inline Halves round_halves(Vec<float> x) {
  return __builtin_convertvector(round_high(x) >> 16, Halves);
}
inline Pairs round_pairs(Vec<float> first, Vec<float> second) {
  return std::bit_cast<Pairs>(round_high(first) >> 16 | (round_high(second) & 0xffff0000u));
}
#endif

// Rows whose terms lie in pieces, `step` apart: the columns of keys or values, tile by tile. `data` begins a piece
// where `step` is not its length.
struct PiecedRows {
  static constexpr Index kPiece = 64;
  const BFloat16* data;
  Index stride, step = kPiece;

  const BFloat16* from_term(Index n) const { return data + size_t(n) / kPiece * step + size_t(n) % kPiece; }
};

// A product of pairs takes so many rows and terms of the sum at once, in blocks of so many of these units of rows and
// of vectors. Whether it beats the same product of floats is for the table of instruction sets to know.
#if defined(__AMX_BF16__)
constexpr bool kFastPairs = true, kMatrixUnit = true;
constexpr int kPairRows = 16, kPairDepth = 32, kPairBlockRows = 2, kPairBlockVectors = 2;
constexpr int kPairVectors = 2;  // of a panel: its rows and sums stay in the first cache
// So many tiles of keys, or panels, are multiplied at once where a product sums over them: to load and store its sums
// costs as much as two products of tiles.
constexpr int kPairTiles = 4;

// The thread's matrix unit, set to tiles of 16 rows of 64 bytes; what it was set to before comes back at the end.
class MatrixUnit {
 public:
  MatrixUnit() {
    struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } const shape;
    static_assert(sizeof shape == sizeof before_);
    _tile_storeconfig(before_);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    _tile_loadconfig(&shape);
  }
  ~MatrixUnit() { _tile_loadconfig(before_); }
  MatrixUnit(const MatrixUnit&) = delete;

 private:
  alignas(64) uint8_t before_[64];
};

// out = a b (add: out += a b) for Rows by Columns tiles, a in rows of pairs, b in pair panels. The fences are the
// compiler's: it does not know what tile instructions read.
template <int Rows, int Columns>
inline void multiply_tiles(float* out, Index ldo, const PiecedRows& a, const BFloat16* b, Index ldb, Index count,
                           bool add) {
  const Index out_bytes = ldo * 4, a_bytes = a.stride * 2, b_bytes = ldb * 2;
  float* below = out + kPairRows * ldo;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  if (add) {
    _tile_loadd(0, out, out_bytes);
    if constexpr (Columns > 1) _tile_loadd(1, out + 16, out_bytes);
    if constexpr (Rows > 1) _tile_loadd(2, below, out_bytes);
    if constexpr (Rows > 1 && Columns > 1) _tile_loadd(3, below + 16, out_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (Index n = 0; n < count; n += kPairDepth, b += kPairDepth / 2 * ldb) {
    const BFloat16* terms = a.from_term(n);
    _tile_loadd(4, terms, a_bytes);
    _tile_loadd(6, b, b_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (Columns > 1) {
      _tile_loadd(7, b + 32, b_bytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (Rows > 1) {
      _tile_loadd(5, terms + kPairRows * a.stride, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (Rows > 1 && Columns > 1) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, out_bytes);
  if constexpr (Columns > 1) _tile_stored(1, out + 16, out_bytes);
  if constexpr (Rows > 1) _tile_stored(2, below, out_bytes);
  if constexpr (Rows > 1 && Columns > 1) _tile_stored(3, below + 16, out_bytes);
  std::atomic_signal_fence(std::memory_order_seq_cst);
}
// The same for one tile of rows or more, whose sums are of one or two units of terms (`two`): all tiles of b then
// stay in registers.
template <int Columns>
inline void multiply_tiles_by_few(float* out, Index ldo, const BFloat16* a, Index lda, const BFloat16* b, Index ldb,
                                  Index tiles, bool two, bool add) {
  const Index out_bytes = ldo * 4, a_bytes = lda * 2, b_bytes = ldb * 2;
  const BFloat16* second = b + kPairDepth / 2 * ldb;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  _tile_loadd(4, b, b_bytes);
  if constexpr (Columns > 1) _tile_loadd(5, b + 32, b_bytes);
  if (two) _tile_loadd(6, second, b_bytes);
  if constexpr (Columns > 1)
    if (two) _tile_loadd(7, second + 32, b_bytes);
  _tile_loadd(2, a, a_bytes);
  if (two) _tile_loadd(3, a + kPairDepth, a_bytes);
  for (Index r = 0; r < tiles; ++r, out += kPairRows * ldo) {
    const bool more = r + 1 < tiles;  // whose tiles are loaded before these sums are stored
    a += kPairRows * lda;
    if (add) {
      _tile_loadd(0, out, out_bytes);
      if constexpr (Columns > 1) _tile_loadd(1, out + 16, out_bytes);
    } else {
      _tile_zero(0);
      _tile_zero(1);
    }
    _tile_dpbf16ps(0, 2, 4);
    if constexpr (Columns > 1) _tile_dpbf16ps(1, 2, 5);
    if (more) _tile_loadd(2, a, a_bytes);
    if (two) {
      _tile_dpbf16ps(0, 3, 6);
      if constexpr (Columns > 1) _tile_dpbf16ps(1, 3, 7);
      if (more) _tile_loadd(3, a + kPairDepth, a_bytes);
    }
    _tile_stored(0, out, out_bytes);
    if constexpr (Columns > 1) _tile_stored(1, out + 16, out_bytes);
  }
  std::atomic_signal_fence(std::memory_order_seq_cst);
}
#else
#if defined(__AVX512BF16__)
constexpr bool kFastPairs = true;
#else
constexpr bool kFastPairs = false;
#endif
constexpr bool kMatrixUnit = false;
constexpr int kPairRows = 1, kPairDepth = 2, kPairBlockRows = kRegisterRows, kPairBlockVectors = kRegisterVectors;
constexpr int kPairVectors = kRegisterVectors, kPairTiles = 1;
struct MatrixUnit {};
template <int Rows, int Columns>
void multiply_tiles(float* out, Index ldo, const PiecedRows& a, const BFloat16* b, Index ldb, Index count, bool add);
template <int Columns>
void multiply_tiles_by_few(float* out, Index ldo, const BFloat16* a, Index lda, const BFloat16* b, Index ldb,
                           Index tiles, bool two, bool add);
#endif

}  // namespace attention_ops
