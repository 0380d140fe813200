// A mask's expression as an argument of kernels: how much of a tile it leaves, and the bits of a row.
#pragma once
#include "kernels/mask/mask.h"
#include "kernels/view.h"

namespace attention_ops {

// Calls f with a tag of the kind's type.
template <class F, size_t... I>
HOST_DEVICE void with_kind(int kind, F&& f, std::index_sequence<I...>) {
  (void)((kind == int(I) && (f(std::type_identity<std::variant_alternative_t<I, MaskKind>>()), true)) || ...);
}

// A mask of any batch and head, its expression in postfix order. Kinds are built where they are asked.
class MaskProgram {
 public:
  MaskProgram() = default;
  explicit MaskProgram(const MaskProblem& problem) : queries_(problem.queries), keys_(problem.keys) {
    for (const int step : problem.spec->program) program_[steps_++] = static_cast<int8_t>(step);
    int data = 0;
    for (size_t n = 0; n < problem.spec->leaves.size(); ++n) {
      const MaskLeaf& leaf = problem.spec->leaves[n];
      leaves_[n] = {leaf.kind, data, {}};
      std::copy(leaf.arguments.begin(), leaf.arguments.end(), leaves_[n].arguments);
      data += static_cast<int>(kind_info(leaf.kind).data.size());
    }
    std::copy_n(problem.data, data, data_);
  }

  HOST_DEVICE bool empty() const { return steps_ == 0; }

  HOST_DEVICE Cover cover(Index batch, Index head, const Tile& tile) const {
    if (empty()) return Cover::all;
    uint32_t stack = 0;  // two bits for each operand
    for (int n = 0; n < steps_; ++n) {
      if (program_[n] >= 0) {
        stack = stack << 2 | uint32_t(leaf_cover(leaves_[program_[n]], batch, head, tile));
        continue;
      }
      const Cover b = Cover(stack & 3), a = Cover(stack >> 2 & 3);
      stack = (stack >> 4) << 2 | uint32_t(program_[n] == MaskSpec::kAnd ? a & b : a | b);
    }
    return Cover(stack);
  }

  // Bit n: whether row i sees key j + n, for `count` <= 32 keys.
  HOST_DEVICE uint32_t visible(Index batch, Index head, int32_t i, int32_t j, int count) const {
    const uint32_t every = count == 32 ? ~0u : (1u << count) - 1;
    if (empty()) return every;
    uint32_t stack[kMaxMaskLeaves];
    int top = 0;
    for (int n = 0; n < steps_; ++n) {
      if (program_[n] >= 0) {
        stack[top++] = leaf_visible(leaves_[program_[n]], batch, head, i, j, count);
        continue;
      }
      --top;
      stack[top - 1] = program_[n] == MaskSpec::kAnd ? stack[top - 1] & stack[top] : stack[top - 1] | stack[top];
    }
    return stack[0];
  }

 private:
  static constexpr int kMaxArguments = 2;
  struct Leaf {
    int32_t kind, data;
    int64_t arguments[kMaxArguments];
  };

  HOST_DEVICE MaskSite site(const Leaf& leaf, Index batch, Index head) const {
    return {batch, head, queries_, keys_, leaf.arguments, data_ + leaf.data};
  }
  HOST_DEVICE Cover leaf_cover(const Leaf& leaf, Index batch, Index head, const Tile& tile) const {
    Cover cover = Cover::none;
    with_kind(
        leaf.kind, [&]<class Kind>(std::type_identity<Kind>) { cover = Kind(site(leaf, batch, head)).cover(tile); },
        std::make_index_sequence<kMaskKinds>());
    return cover;
  }
  HOST_DEVICE uint32_t leaf_visible(const Leaf& leaf, Index batch, Index head, int32_t i, int32_t j, int count) const {
    uint32_t bits = 0;
    with_kind(
        leaf.kind,
        [&]<class Kind>(std::type_identity<Kind>) {
          const Kind kind(site(leaf, batch, head));
          for (int n = 0; n < count; ++n) bits |= uint32_t(kind.visible(i, j + n)) << n;
        },
        std::make_index_sequence<kMaskKinds>());
    return bits;
  }

  int32_t steps_ = 0, queries_ = 0, keys_ = 0;
  int8_t program_[2 * kMaxMaskLeaves] = {};
  Leaf leaves_[kMaxMaskLeaves] = {};
  MaskData data_[2 * kMaxMaskLeaves] = {};  // a kind takes two tensors at most
};

}  // namespace attention_ops
