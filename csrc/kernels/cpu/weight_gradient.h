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
  // In a second derivative: the tangents of v and do_t, null where they do not move, and of log p.
  PaddedRows<E> v_dot{};
  const E* do_dot_t = nullptr;
  const T* log_p_dot = nullptr;  // [keys, panel width]
};

template <class T, class E = T>
class WeightGradient {
 public:
  virtual ~WeightGradient() = default;
  virtual bool needs_log() const { return false; }
  virtual bool has_values() const { return false; }
  virtual void fill(T* dp, const GradientTile<T, E>& tile) const = 0;  // [keys, panel width]
  virtual void fill_tangent(T* dp_dot, const GradientTile<T, E>& tile) const = 0;
};

// out = p v: dp = v grad_out'
template <class T, class E = T>
class ValueGradient final : public WeightGradient<T, E> {
  static constexpr int kWidth = Panel<T, E>::kWidth;

 public:
  explicit ValueGradient(Index value_width) : value_width_(value_width) {}
  bool has_values() const override { return true; }
  void fill(T* dp, const GradientTile<T, E>& t) const override { multiply<false>(dp, t, t.v, t.do_t); }
  // v grad_out_dot' + v_dot grad_out'
  void fill_tangent(T* dp_dot, const GradientTile<T, E>& t) const override {
    if (t.do_dot_t) multiply<false>(dp_dot, t, t.v, t.do_dot_t);
    if (t.v_dot.data && t.do_dot_t) return multiply<true>(dp_dot, t, t.v_dot, t.do_t);
    if (t.v_dot.data) return multiply<false>(dp_dot, t, t.v_dot, t.do_t);
    if (!t.do_dot_t) std::fill_n(dp_dot, Index(t.keys) * kWidth, T(0));
  }

 private:
  template <bool Add>
  void multiply(T* dp, const GradientTile<T, E>& t, const PaddedRows<E>& rows, const E* panel) const {
    each_span(t.scores, [&](auto vectors, const Span& span) {
      const Index lane = span.vector * kLanes<T>;
      T* to = dp + span.key * kWidth + lane;
      const E* v = rows.data + span.key * rows.stride;
      if constexpr (kPaired<E>)
        multiply_pairs<Add>(to, kWidth, {v, rows.stride}, {panel + 2 * lane, 2 * kWidth}, span.keys, vectors,
                            value_width_);
      else
        multiply_rows_into<vectors>(to, kWidth, Add ? to : static_cast<const T*>(nullptr), v, rows.stride, panel + lane,
                                    kWidth, span.keys, value_width_);
    });
  }

  Index value_width_;
};

}  // namespace attention_ops
