// What every attention kernel is given, and the pieces of it that one batch and head see.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>

#include "kernels/cpu/arena.h"
#include "kernels/cpu/elementary.h"
#include "kernels/cpu/pairs.h"
#include "kernels/mask/mask.h"
#include "kernels/philox.h"
#include "kernels/view.h"

namespace attention_ops {

constexpr int kTileKeys = 64;  // keys of a tile, in every kernel

// What is known of the rows a and b of one table: below `head` all are the same, and from `tail` on, if they are
// clipped.
struct TableFacts {
  bool is_finite;
  Index head, tail;
};

// Rows that depend on the distance alone, row j - i + Lq - 1: a bias r, then a, which is added to the key, then b,
// which is added to the value. Not all tables have a and b.
template <class T>
struct DistanceTable {
  Matrices<const T> rows;  // [B, H, Lq + Lk - 1, 1 or 1 + D or 1 + D + Dv]
  bool has_keys = false, has_values = false;
  const TableFacts* facts = nullptr;  // of each table, where there are a and b
  Index facts_batch_stride = 0, facts_head_stride = 0;

  bool defined() const { return rows.data; }
  const T* row(Index b, Index h, Index n) const { return rows.at(b, h) + n * rows.row_stride; }
  const TableFacts& facts_of(Index b, Index h) const { return facts[b * facts_batch_stride + h * facts_head_stride]; }
};

// s = softcap(scale q (k + a)') + bias + r where the mask allows, computed in T. Rows are elements of type E next to
// each other; k and v are readable in whole units of rows and columns (pairs.h), and what is past their columns is
// zero.
template <class T, class E = T>
struct Problem {
  Index batch = 0, heads = 0, key_heads = 0, queries = 0, keys = 0, width = 0, value_width = 0;
  Matrices<const E> q, k, v;
  Tensor4 bias;
  DistanceTable<T> distance;
  const T* sinks = nullptr;  // [H]
  MaskProblem mask;
  const int64_t *true_heads = nullptr, *true_rows = nullptr;  // what the mask calls each head and row
  T scale = 1, softcap = 0;                                   // softcap 0: none
  Dropout dropout;

  Index group() const { return heads / key_heads; }
  // Whether weights are exp(s - lse) of the products and the mask alone.
  bool is_plain() const { return !adds() && softcap == 0 && !dropout.on(); }
  bool adds() const { return bias.defined() || distance.defined(); }  // to the scores
  double row_operations() const { return 8.0 * batch * heads * queries * (width + value_width); }
  double pair_operations() const {
    const Index of_rows = distance.has_keys * width + distance.has_values * value_width;
    return 2.0 * batch * heads * queries * keys * (width + value_width + of_rows + 8);
  }
  // Turns products into log2 units, or into units of the softcap.
  T query_factor() const { return softcap > 0 ? scale / softcap : scale * kLog2e<T>; }
};

inline std::atomic<int64_t> visited_tiles{0};

// One batch and query head.
template <class T, class E = T>
struct Site {
  const Problem<T, E>& of;
  Index b, h;
  const E *q, *k, *v;
  Mask mask;
  DropoutStream dropout;

  Site(const Problem<T, E>& p, Index b, Index h)
      : of(p),
        b(b),
        h(h),
        q(p.q.at(b, h)),
        k(p.k.at(b, h / p.group())),
        v(p.v.at(b, h / p.group())),
        mask(p.mask, b, p.true_heads ? p.true_heads[h] : h),
        dropout(p.dropout.on() ? p.dropout.stream(b, h) : DropoutStream{}) {}

  // In log2 units; a finite one stays finite.
  T sink() const {
    if (!of.sinks) return -kInfinity<T>;
    constexpr T limit = std::numeric_limits<T>::max();
    return std::isfinite(of.sinks[h]) ? std::clamp(of.sinks[h] * kLog2e<T>, -limit, limit) : of.sinks[h];
  }
};

// Up to `kWidth` queries, one in each lane; lanes past `count` repeat the last row's number.
template <class T, class E = T>
struct Panel {
  static constexpr int kVectors = kPaired<E> ? kPairVectors : kRegisterVectors, kWidth = kVectors * kLanes<T>;
  Index first;
  int count;
  int32_t rows[kWidth], low, high;
  const E* q_t = nullptr;  // [width, kWidth], multiplied by query_factor(); of bfloat16 the pair panel as it is

  Panel(const Problem<T, E>& p, Index number)
      : first(number * kWidth), count(int(std::min<Index>(kWidth, p.queries - first))) {
    for (int lane = 0; lane < kWidth; ++lane) {
      const Index row = first + std::min(lane, count - 1);
      rows[lane] = static_cast<int32_t>(p.true_rows ? p.true_rows[row] : row);
    }
    low = *std::min_element(rows, rows + kWidth);
    high = *std::max_element(rows, rows + kWidth);
  }

  int vectors() const { return (count + kLanes<T> - 1) / kLanes<T>; }
  static Index number(Index queries) { return (queries + kWidth - 1) / kWidth; }
  Tile tile(Index key, int keys) const {
    return {rows, count, low, high, static_cast<int32_t>(key), static_cast<int32_t>(key + keys - 1)};
  }
};

// Whether a panel sees none of some keys, however many, of which those past the last do not count.
template <class T, class E>
bool is_hidden(const Site<T, E>& site, const Panel<T, E>& panel, Index key, Index keys) {
  return site.mask.cover(panel.tile(key, int(std::min(keys, site.of.keys - key)))) == Cover::none;
}

}  // namespace attention_ops
