// Where weights go: rows [B, H, Lq, Lk], or [B, 1, Lq, Lk] for their mean over heads, in any element type. A task is a
// panel of queries, of one head or of all: its weights are gathered in lanes, [Lk, panel width], and written once.
#pragma once
#include "kernels/cpu/problem.h"
#include "kernels/cpu/rows.h"

namespace attention_ops {

template <class T, class E = T>
class WeightRows {
 public:
  static constexpr int kWidth = Panel<T, E>::kWidth;

  WeightRows(const Problem<T, E>& p, const Tensor4& out, bool average) : p_(p), out_(out), average_(average) {}

  struct Part {
    Panel<T, E> panel;
    Index b, first, last;  // heads
  };

  bool average() const { return average_; }
  Index tasks() const { return p_.batch * heads() * Panel<T, E>::number(p_.queries); }
  Part part(Index task) const {
    const Index panels = Panel<T, E>::number(p_.queries), h = task / panels % heads();
    return {{p_, task % panels}, task / panels / heads(), h, average_ ? p_.heads : h + 1};
  }
  Index tiles() const { return (p_.keys + kTileKeys - 1) / kTileKeys; }

  // out := factor of its row * weights, and 0 in the tiles that are not `seen`.
  void write(const T* weights, const T* factors, const bool* seen, const Part& part) const {
    with_element(out_.element, [&]<class X>(X*) {
      X* first = static_cast<X*>(out_.data) + part.b * out_.strides[0] + part.panel.first * out_.strides[2];
      if (!average_) first += part.first * out_.strides[1];
      for (Index tile = 0, next; tile < tiles(); tile = next) {
        for (next = tile + 1; next < tiles() && seen[next] == seen[tile];) ++next;
        const Index key = tile * kTileKeys, keys = std::min(next * kTileKeys, p_.keys) - key;
        if (seen[tile])
          write_tiles(first + key, weights + key * kWidth, factors, part.panel.count, keys);
        else
          for (int r = 0; r < part.panel.count; ++r) std::fill_n(first + r * out_.strides[2] + key, keys, X{});
      }
    });
  }

 private:
  Index heads() const { return average_ ? 1 : p_.heads; }

  template <class X>
  void write_tiles(X* to, const T* weights, const T* factors, int rows, Index keys) const {
    lanes_to_rows(weights, kWidth, factors, rows, keys, [&](int r, Index j, Vec<T> w, int n) {
      X* line = to + r * out_.strides[2] + j;
      if constexpr (std::is_same_v<T, Wide<X>>) return write_elements(line, w, n);
      for (int i = 0; i < n; ++i) line[i] = convert<X>(w[i]);
    });
  }

  const Problem<T, E>& p_;
  Tensor4 out_;
  bool average_;
};

}  // namespace attention_ops
