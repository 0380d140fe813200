// What every CUDA kernel is given: plain values, filled in by the host and passed as arguments.
#pragma once
#include <algorithm>

#include "kernels/cuda/mask_program.h"
#include "kernels/decode.h"
#include "kernels/philox.h"
#include "kernels/view.h"

struct CUstream_st;

namespace attention_ops {

using Stream = CUstream_st*;

// Columns of the rows by distance, those that are added to keys or to values; there may be none.
struct DistanceColumns {
  Index first, count;
};

// s = softcap(scale q (k + a)') + bias + r where the mask allows, o = p (v + b). Sums, rows by distance and what stands
// in `void` pointers are of one type: float64 for float64, float32 for the others.
struct Problem {
  Index batch = 0, heads = 0, key_heads = 0, queries = 0, keys = 0, width = 0, value_width = 0;
  Tensor4 q, k, v, bias;
  Tensor4 distance;             // r, a and b of key j and query i in row j - i + Lq - 1
  const void* sinks = nullptr;  // [H]
  MaskProgram mask;
  const int32_t *true_heads = nullptr, *true_rows = nullptr;  // what the mask calls each head and row; null: as here
  double scale = 1, softcap = 0;                              // softcap 0: none
  double product_scale = 1;  // of q (k + a)': scale, over the softcap if there is one; here, so that no tile divides
  Dropout dropout;
  const int* only_if = nullptr;  // a flag; where it is not raised nothing is to be done

  HOST_DEVICE Index group() const { return heads / key_heads; }
  HOST_DEVICE Index rows() const { return batch * heads * queries; }
  HOST_DEVICE bool adds() const { return bias.defined() || distance.defined(); }  // to the scores
  HOST_DEVICE DistanceColumns key_columns() const { return {1, distance.sizes[3] > 1 ? width : 0}; }
  HOST_DEVICE DistanceColumns value_columns() const {
    return {1 + width, distance.sizes[3] > 1 + width ? value_width : 0};
  }
};

struct ForwardResult {
  Tensor4 out;  // [B, H, Lq, Dv]
  void* lse;    // [B, H, Lq]
};

struct BackwardInput {
  Tensor4 out, grad_out;        // [B, H, Lq, Dv]
  const void *lse, *grad_lse;   // [B, H, Lq]; grad_lse may be null
  void *base, *log2_l, *delta;  // [B, H, Lq], written by the first pass: p = 2^(s - base - log2_l); delta may be null
  int* inexact = nullptr;       // a flag, raised where tensor cores will not do: lse too large, or a value not finite
};

// The tangents of a problem's inputs, and of lse in a backward pass; what does not move has none.
struct Tangents {
  Tensor4 q, k, v, bias, distance;
  const void *sinks = nullptr, *lse = nullptr;  // [H]; [B, H, Lq]
};

// The direction of a second derivative: tangents of every input of a backward pass, and of what the forward gave. The
// results are then the tangents of the gradients. A first derivative stands still.
struct BackwardTangent {
  Tangents of;
  Tensor4 out, grad_out;           // [B, H, Lq, Dv]
  const void* grad_lse = nullptr;  // [B, H, Lq]
  void* delta = nullptr;           // [B, H, Lq], written by a pass of its own
};
struct Still {};

// A gradient that is not defined was not asked for.
struct BackwardResult {
  Tensor4 grad_query, grad_key, grad_value, grad_bias;
  void* grad_sinks = nullptr;  // [H]
  void* grad_lse = nullptr;    // [B, H, Lq], where lse is an input: minus the sum of ds
};

// What a loss of the weights gives to each of them, instead of what a loss of out does: factor grad_ij +
// grad_column_sum_j - grad_entropy_i (log w + 1) + grad_maximum_i [j = argmax_i]. Each may be absent.
struct WeightGradient {
  Tensor4 grad;  // of the weights, or of their mean over heads
  double factor = 1;
  const void *column_sum = nullptr, *entropy = nullptr, *maximum = nullptr;  // [B, H, Lk], [B, H, Lq], [B, H, Lq]
  const Index* argmax = nullptr;                                             // [B, H, Lq]
};

// The direction of a second derivative of weights: tangents of the inputs, and of what the loss gives.
struct WeightGradientTangent {
  WeightGradient source, moved;
  Tangents of;
};

struct Summaries {
  void *column_sum, *entropy, *maximum;  // [B, H, Lk], [B, H, Lq], [B, H, Lq]
  Index* argmax;  // [B, H, Lq], the first key of the largest weight; given where tangents are asked
};

struct DropoutMask {
  Dropout dropout;
  Index batch, heads, queries, keys;
  bool* kept;  // [B, H, Lq, Lk]
};

// Rotary positions, as csrc/ops/ops.h says of them.
struct RopeTableProblem {
  Index batch, axes, length, pairs;
  const double *positions, *inv_freq;  // [batch, axes, length], [pairs]
  double factor;
  void* table;  // [batch, length, 2, pairs]: cosines and sines, in the type of sums
  bool is_double;
};
struct RopeProblem {
  Tensor4 x, out;  // [B, H, L, D]
  Index pairs, table_batch;
  const void* table;  // [table_batch, L, 2, pairs]
  bool interleaved, inverse;
};
// The axes of some of the pairs, as an argument: nothing has to be copied to the device.
struct RopeAxes {
  static constexpr int kMost = 256;
  Index first;
  int count;
  int32_t axis[kMost];
};

constexpr int kSimtTile = 64, kSimtThreads = 256;

inline Index tiles_of(Index length, Index tile) {
  return (length + tile - 1) / tile;
}

// Into how many shares a gradient's sums are cut, each of `terms`, so that there are tasks enough. It depends on shapes
// alone.
inline Index shares_of(Index owners, Index terms) {
  constexpr Index kTasks = 1024;
  return owners > 0 ? std::clamp<Index>(kTasks / owners, 1, std::max<Index>(terms, 1)) : 1;
}

// The gradient of a bias: a task owns a tile of it and one share of what is summed into it, which is batches, heads,
// and tiles along the axes over which the bias is broadcast.
struct BiasPlan {
  Index rows, columns;   // tiles of the score matrix
  Index owners, shares;  // tiles of grad_bias; parts of each sum
  void* sums = nullptr;  // [shares, grad_bias], where there are several

  BiasPlan(const Problem& p, const Tensor4& grad)
      : rows(tiles_of(p.queries, kSimtTile)), columns(tiles_of(p.keys, kSimtTile)) {
    owners = grad.sizes[0] * grad.sizes[1] * (grad.sizes[2] == 1 ? 1 : rows) * (grad.sizes[3] == 1 ? 1 : columns);
    shares = shares_of(owners, owners > 0 ? p.batch * p.heads * rows * columns / owners : 0);
  }
  HOST_DEVICE Index tasks() const { return owners * shares; }
};

// The gradient of rows by distance: a task owns 64 rows of one table, 64 of their columns, and one share of what is
// summed into them, which is tiles of queries, and batches and heads where they share the table. Its rows lie in two
// tiles of keys for each tile of queries: those on the diagonal of a tile and above, and below that of the next.
struct DistancePlan {
  Index rows, columns;           // tiles of the score matrix
  Index before, ranges;          // ranges of 64 rows: those before that of tile (0, 0); all
  Index key_parts, value_parts;  // of the columns; the first has the bias too
  Index batches, heads;          // that share a table
  Index owners, shares;
  void* sums = nullptr;  // [shares, grad_distance], where there are several

  DistancePlan(const Problem& p, const Tensor4& grad)
      : rows(tiles_of(p.queries, kSimtTile)),
        columns(tiles_of(p.keys, kSimtTile)),
        before(tiles_of(p.queries - 1, kSimtTile)),
        ranges(before + columns),
        key_parts(std::max<Index>(tiles_of(p.key_columns().count, kSimtTile), 1)),
        value_parts(tiles_of(p.value_columns().count, kSimtTile)),
        batches(grad.sizes[0] == 1 ? p.batch : 1),
        heads(grad.sizes[1] == 1 ? p.heads : 1),
        owners(grad.sizes[0] * grad.sizes[1] * ranges * parts()),
        shares(shares_of(owners, terms())) {}
  HOST_DEVICE Index parts() const { return key_parts + value_parts; }
  HOST_DEVICE Index terms() const { return batches * heads * rows; }
  HOST_DEVICE Index tasks() const { return owners * shares; }
};

// Few rows over many keys: blocks take a chunk of keys each, and a part of wide values. What they leave is merged.
constexpr Index kDecodeChunk = 256, kDecodeColumns = 256, kDecodeWidth = 512;  // the last: of query and key, at most

struct DecodePlan {
  Index rows, chunks, parts;                      // rows of a key head
  void *m = nullptr, *l = nullptr, *o = nullptr;  // [B, Hkv, chunks, rows], and of o its columns

  explicit DecodePlan(const Problem& p)
      : rows(p.group() * p.queries),
        chunks(tiles_of(p.keys, kDecodeChunk)),
        parts(std::max<Index>(tiles_of(p.value_width, kDecodeColumns), 1)) {}
  Index tasks(const Problem& p) const { return p.batch * p.key_heads * chunks * parts; }
  Index all_rows(const Problem& p) const { return p.batch * p.key_heads * chunks * rows; }
};

}  // namespace attention_ops
