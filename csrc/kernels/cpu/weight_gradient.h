// Where dp, the gradient of a tile's weights, comes from. The backward pass is the same for every source.
#pragma once
#include "kernels/cpu/score.h"

namespace attention_ops {

// One tile of the backward pass.
template <class T, class E = T>
struct GradientTile {
  Index b, h, row, key;  // first row and key
  int rows, keys;
  PaddedRows<E> v;  // [keys, Dv] rows of this tile's keys
  const E* do_t;    // [Dv, panel width]
  const T* log2_p;  // [keys, panel width], where the source asks for it
  const ScoreTile<T>& scores;
};

template <class T, class E = T>
class WeightGradient {
 public:
  virtual ~WeightGradient() = default;
  virtual bool needs_log() const { return false; }
  virtual bool has_values() const { return false; }
  virtual void fill(T* dp, const GradientTile<T, E>& tile) const = 0;  // [keys, panel width]
};

// out = p v: dp = v grad_out'
template <class T, class E = T>
class ValueGradient final : public WeightGradient<T, E> {
  static constexpr int kWidth = Panel<T, E>::kWidth;

 public:
  explicit ValueGradient(Index value_width) : value_width_(value_width) {}
  bool has_values() const override { return true; }
  void fill(T* dp, const GradientTile<T, E>& t) const override {
    each_span(t.scores, [&](auto vectors, const Span& span) {
      const Index lane = span.vector * kLanes<T>;
      T* to = dp + span.key * kWidth + lane;
      const E* v = t.v.data + span.key * t.v.stride;
      if constexpr (kPaired<E>)
        multiply_pairs<false>(to, kWidth, {v, t.v.stride}, {t.do_t + 2 * lane, 2 * kWidth}, span.keys, vectors,
                              value_width_);
      else
        multiply_rows_into<vectors>(to, kWidth, static_cast<const T*>(nullptr), v, t.v.stride, t.do_t + lane, kWidth,
                                    span.keys, value_width_);
    });
  }

 private:
  Index value_width_;
};

}  // namespace attention_ops
