// Random shapes of attention problems, their masks, and random tensors for the kinds of a mask.
#pragma once
#include <vector>

#include "arrays.h"
#include "kernels/mask/parse.h"

namespace attention_ops {

struct Shape {
  Index B, H, Hkv, Lq, Lk, D, Dv;
};

inline constexpr const char* kMasks[] = {"",
                                         "causal",
                                         "causal(upper_left)",
                                         "sliding_window(20, 3)",
                                         "sliding_window(unbounded, -2)",
                                         "dilated(3)",
                                         "ranges",
                                         "dense",
                                         "block_sparse(16)",
                                         "padding",
                                         "padding & query_padding",
                                         "prefix_lm",
                                         "causal & (document | global_tokens)"};

inline Shape draw_shape() {
  const Index group = draw(1, 3), Hkv = draw(1, 2);
  if (draw(0, 2) == 0)
    return {draw(1, 2), group * Hkv, Hkv, draw(1, 16 / group), draw(0, 1200), draw(0, 70), draw(0, 70)};
  if (draw(0, 11) == 0)  // tiles enough to wait for each other
    return {1, group, 1, draw(120, 300), draw(280, 400), draw(1, 70), draw(65, 140)};
  if (draw(0, 4) == 0)  // so many that a backward task takes whole heads, or some of them
    return {draw(4, 10), group * 2, 2, draw(1, 70), draw(1, 70), draw(1, 20), draw(1, 20)};
  const Index Lq = draw(0, 9) == 0 ? 0 : draw(1, 150), Lk = draw(0, 9) == 0 ? 0 : draw(1, 200);
  return {draw(1, 2), group * Hkv, Hkv, Lq, Lk, draw(0, 9) == 0 ? 0 : draw(1, 70), draw(0, 9) == 0 ? 0 : draw(1, 70)};
}

// Random tensors for the kinds of a mask, in the order in which they take them.
class MaskTensors {
 public:
  MaskTensors(const MaskSpec& spec, const Shape& s) {
    for (const MaskLeaf& leaf : spec.leaves)
      for (const DataInfo& info : kind_info(leaf.kind).data) add(info, leaf, s);
  }
  const MaskData* data() const { return data_.data(); }

 private:
  static Index size(char axis, const MaskLeaf& leaf, const Shape& s) {
    switch (axis) {
      case 'B':
        return s.B;
      case 'H':
        return s.H;
      case 'k':
        return s.Lk;
      case 'r':
        return (s.Lq + leaf.arguments[0] - 1) / leaf.arguments[0];
      case 'c':
        return (s.Lk + leaf.arguments[0] - 1) / leaf.arguments[0];
      default:
        return s.Lq;
    }
  }

  void add(const DataInfo& info, const MaskLeaf& leaf, const Shape& s) {
    MaskData data;
    Index count = 1;
    for (int axis = int(info.axes.size()) - 1; axis >= 0; --axis) {
      data.strides[axis] = count;
      count *= size(info.axes[axis], leaf, s);
    }
    if (info.is_integer) {
      integers_.push_back(array_of<int64_t>(count));
      for (Index i = 0; i < count; ++i) integers_.back()[i] = draw(-2, s.Lk + 2);
      data.data = integers_.back().get();
    } else {
      flags_.push_back(array_of<bool>(count));
      for (Index i = 0; i < count; ++i) flags_.back()[i] = draw(0, 1) == 1;
      data.data = flags_.back().get();
    }
    data_.push_back(data);
  }

  std::vector<Array<int64_t>> integers_;
  std::vector<Array<bool>> flags_;
  std::vector<MaskData> data_;
};

}  // namespace attention_ops
