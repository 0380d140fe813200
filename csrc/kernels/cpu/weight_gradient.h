// Where dp, the gradient of a tile's weights, comes from. The backward pass is the same for every source.
#pragma once
#include "kernels/cpu/score.h"

namespace attention_ops {

// One tile of the backward pass.
template <class T>
struct GradientTile {
  Index b, h, row, key;  // first row and key
  int rows, keys;
  const T* v;  // [keys, Dv] rows of this tile's keys
  Index v_stride;
  const T* do_t;    // [Dv, panel width]
  const T* log2_p;  // [keys, panel width], where the source asks for it
  const ScoreTile<T>& scores;
};

template <class T>
class WeightGradient {
 public:
  virtual ~WeightGradient() = default;
  virtual bool needs_log() const { return false; }
  virtual bool has_values() const { return false; }
  virtual void fill(T* dp, const GradientTile<T>& tile) const = 0;  // [keys, panel width]
};

// out = p v: dp = v grad_out'
template <class T>
class ValueGradient final : public WeightGradient<T> {
  static constexpr int kWidth = Panel<T>::kWidth;

 public:
  explicit ValueGradient(Index value_width) : value_width_(value_width) {}
  bool has_values() const override { return true; }
  void fill(T* dp, const GradientTile<T>& t) const override {
    each_span(t.scores, [&](auto vectors, const Span& span) {
      const Index lane = span.vector * kLanes<T>;
      multiply_rows_into<vectors>(dp + span.key * kWidth + lane, kWidth, static_cast<const T*>(nullptr),
                                  t.v + span.key * t.v_stride, t.v_stride, t.do_t + lane, kWidth, span.keys,
                                  value_width_);
    });
  }

 private:
  Index value_width_;
};

}  // namespace attention_ops
