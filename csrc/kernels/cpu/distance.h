// Products with rows that depend on the distance alone (problem.h). Per vector of queries: t[r] = row_r x' is one
// product, and key k of lane l finds its own at r = k + lanes - 1 - l, so a skew of t gives the tile, and the skew
// back of a tile gives what the rows are multiplied by.
#pragma once
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/problem.h"
#include "kernels/cpu/rows.h"

namespace attention_ops {

// Of `count` rows, `stride` apart, without their bias.
template <class T>
TableFacts facts_of_rows(const T* rows, Index count, Index stride, Index width) {
  const auto same = [&](Index a, Index b) {
    return std::equal(rows + a * stride, rows + a * stride + width, rows + b * stride);
  };
  TableFacts facts{all_finite<T>(rows, stride, count, width), 0, count};
  while (facts.head < count && same(0, facts.head)) ++facts.head;
  while (facts.tail > 0 && same(count - 1, facts.tail - 1)) --facts.tail;
  return facts;
}

// Some keys of a tile and one vector of queries.
struct SkewBlock {
  Index first;       // row of key 0 in the last lane; below 0 for lanes past the last query
  int keys, lanes;   // lanes that are queries
  int rows;          // that all of them have
  bool is_constant;  // the rows are all the same
  bool is_finite;    // as are all of their table

  int skipped() const { return int(std::max<Index>(-first, 0)); }  // rows before the table: nobody is given those
};

template <class T>
class Skew {
 public:
  static constexpr int kStep = kLanes<T>, kRows = kTileKeys + kStep - 1;

  void take(Pieces& pieces) { pieces(t_, kRows * kStep); }

  // out[k][:] (+)= rows x', x[width][lanes] with `ldx` between columns
  template <bool Add>
  void multiply(T* out, Index ldo, const PaddedRows<T>& rows, const T* x, Index ldx, Index width,
                const SkewBlock& block) const {
    if (block.is_constant) return multiply_constant<Add>(out, ldo, rows, x, ldx, width, block.keys);
    const int skipped = block.skipped(), count = block.rows;
    std::fill_n(t_, skipped * kStep, T(0));
    multiply_rows_of(t_ + skipped * kStep, rows, x, ldx, count - skipped, width);
    int left = count;
    for (int shift = kStep / 2; shift > 0; shift /= 2) {
      left -= shift;
      const Ints<T> moves = lanes_with(shift);
      const bool last = shift == 1;
      for (int r = 0; r < left; ++r) {
        const Vec<T> moved = moves ? load(t_ + (r + shift) * kStep) : load(t_ + r * kStep);
        if (!last)
          store(t_ + r * kStep, moved);
        else
          store(out + r * ldo, Add ? load(out + r * ldo) + moved : moved);
      }
    }
  }

  // Skews a[keys][lanes] back, for the two products below.
  void spread(const T* a, Index lda, const SkewBlock& block) const {
    const int count = block.rows;
    for (int k = 0; k < block.keys; ++k) store(t_ + k * kStep, load(a + k * lda));
    std::fill(t_ + block.keys * kStep, t_ + count * kStep, T(0));
    for (int shift = 1; shift < kStep; shift *= 2) {
      const Ints<T> moves = lanes_with(shift);
      for (int r = count - 1; r >= 0; --r) {
        const Vec<T> from = r >= shift ? load(t_ + (r - shift) * kStep) : Vec<T>{};
        store(t_ + r * kStep, moves ? from : load(t_ + r * kStep));
      }
    }
  }
  // out[column][lane] += row[column] sum_k a[k][lane], where all rows are that one; without `spread`.
  void add_constant_to_queries(T* out, Index ldo, const PaddedRows<T>& rows, const T* a, Index lda, Index width,
                               const SkewBlock& block) const {
    Vec<T> sum{};
    for (int k = 0; k < block.keys; ++k) sum += load(a + k * lda);
    store(t_, sum);
    if (!block.is_finite) return add_nonzero_to_queries(out, ldo, rows, t_, width, 1);
    for (Index c = 0; c < width; ++c) store(out + c * ldo, load(out + c * ldo) + splat(rows.data[c]) * sum);
  }
  // out[column][lane] += sum_r rows[r][column] t[r][lane]. Rows that nothing is multiplied by may hold anything, as
  // masked places may.
  void add_to_queries(T* out, Index ldo, const PaddedRows<T>& rows, Index width, const SkewBlock& block) const {
    const int skipped = block.skipped(), count = block.rows - skipped;
    const T* t = t_ + skipped * kStep;
    if (!block.is_finite) return add_nonzero_to_queries(out, ldo, rows, t, width, count);
    each_row_tile<kTileRows<1>>(width, [&](auto tile_rows, Index c) {
      Accumulators<T, tile_rows, 1> acc{};
      multiply_columns<T, tile_rows, 1>(acc, rows.data + c, rows.stride, t, kStep, count);
      each<T, tile_rows, 1>(acc, [&](Vec<T>& x, int r, int) {
        T* to = out + (c + r) * ldo;
        store(to, load(to) + x);
      });
    });
  }
  // out[r][:] += sum_lane t[r][lane] x[lane][:], rows of whole vectors; `clean` if all of x is finite.
  void add_to_rows(T* out, Index ldo, const PaddedRows<T>& x, Index width, bool clean, const SkewBlock& block) const {
    const int skipped = block.skipped(), count = block.rows - skipped;
    const T* t = t_ + skipped * kStep;
    if (!clean) return add_nonzero_to_rows(out, ldo, x, t, width, count, block.lanes);
    each_row_tile<kRegisterVectors>(width / kStep, [&](auto vectors, Index column) {
      each_row_tile<kTileRows<vectors>>(count, [&](auto tile_rows, Index r) {
        Accumulators<T, tile_rows, vectors> acc{};
        multiply_rows<T, tile_rows, vectors>(acc, t + r * kStep, kStep, x.data + column * kStep, x.stride, block.lanes);
        each<T, tile_rows, vectors>(acc, [&](Vec<T>& sum, int i, int n) {
          T* to = out + (r + i) * ldo + (column + n) * kStep;
          store(to, load(to) + sum);
        });
      });
    });
  }

 private:
  // to[r] = row_r x'. The last rows are a whole tile too, which begins among those before.
  static void multiply_rows_of(T* to, const PaddedRows<T>& rows, const T* x, Index ldx, int count, Index width) {
    constexpr int kTile = kTileRows<1>;
    const auto multiply = [&](Index r, Index number) {
      multiply_rows_into<1>(to + r * kStep, kStep, static_cast<const T*>(nullptr), rows.data + r * rows.stride,
                            rows.stride, x, ldx, number, width);
    };
    if (count < kTile) return multiply(0, count);
    const Index whole = count / kTile * kTile;
    multiply(0, whole);
    if (whole < count) multiply(count - kTile, kTile);
  }

  template <bool Add>
  void multiply_constant(T* out, Index ldo, const PaddedRows<T>& rows, const T* x, Index ldx, Index width,
                         int keys) const {
    constexpr int kSums = 4;  // that do not wait for each other
    Vec<T> sum[kSums]{};
    for (Index c = 0; c < width; ++c) sum[c % kSums] = fma(splat(rows.data[c]), load(x + c * ldx), sum[c % kSums]);
    const Vec<T> all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    for (int k = 0; k < keys; ++k) store(out + k * ldo, Add ? load(out + k * ldo) + all : all);
  }

  // Lane l is to move by lanes - 1 - l, of which `shift` is one binary digit.
  static Ints<T> lanes_with(int shift) {
    alignas(kVectorBytes) LaneInt<T> lanes[kStep];
    for (int l = 0; l < kStep; ++l) lanes[l] = (kStep - 1 - l) & shift ? -1 : 0;
    return load_lanes<T>(lanes);
  }

  // The same to the bit, but for what is multiplied by 0.
  static void add_nonzero_to_queries(T* out, Index ldo, const PaddedRows<T>& rows, const T* t, Index width, int count) {
    for (Index c = 0; c < width; ++c) {
      Vec<T> acc{};
      for (int r = 0; r < count; ++r) {
        const Vec<T> factor = load(t + r * kStep);
        acc = factor == Vec<T>{} ? acc : fma(splat(rows.data[r * rows.stride + c]), factor, acc);
      }
      store(out + c * ldo, load(out + c * ldo) + acc);
    }
  }
  static void add_nonzero_to_rows(T* out, Index ldo, const PaddedRows<T>& x, const T* t, Index width, int count,
                                  int lanes) {
    for (int r = 0; r < count; ++r)
      for (Index c = 0; c < width; c += kStep) {
        Vec<T> acc{};
        for (int l = 0; l < lanes; ++l)
          if (const T factor = t[r * kStep + l]; factor != 0)
            acc = fma(splat(factor), load(x.data + l * x.stride + c), acc);
        store(out + r * ldo + c, load(out + r * ldo + c) + acc);
      }
  }

  T* t_ = nullptr;  // [kRows, lanes]
};

}  // namespace attention_ops
