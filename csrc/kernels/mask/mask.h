// The list of mask kinds, and an expression of them built for one batch and head.
#pragma once
#include <array>
#include <string>
#include <tuple>
#include <utility>
#include <variant>

#include "kernels/mask/block_sparse.h"
#include "kernels/mask/causal.h"
#include "kernels/mask/dense.h"
#include "kernels/mask/dilated.h"
#include "kernels/mask/document.h"
#include "kernels/mask/global_tokens.h"
#include "kernels/mask/padding.h"
#include "kernels/mask/prefix_lm.h"
#include "kernels/mask/query_padding.h"
#include "kernels/mask/ranges.h"
#include "kernels/mask/sliding_window.h"

namespace attention_ops {

// A new kind is its header and its name here.
using MaskKind = std::variant<Causal, SlidingWindow, Dilated, Padding, QueryPadding, Document, PrefixLm, GlobalTokens,
                              BlockSparse, Ranges, Dense>;
constexpr int kMaskKinds = std::variant_size_v<MaskKind>;
constexpr int kMaxMaskLeaves = 16;

namespace detail {

template <size_t... I>
const KindInfo& kind_info(int kind, std::index_sequence<I...>) {
  static const std::array<const KindInfo*, sizeof...(I)> infos{&std::variant_alternative_t<I, MaskKind>::info...};
  return *infos[kind];
}

template <size_t... I>
MaskKind make_kind(int kind, const MaskSite& site, std::index_sequence<I...>) {
  using Make = MaskKind (*)(const MaskSite&);
  static constexpr Make makers[] = {
      [](const MaskSite& s) { return MaskKind(std::variant_alternative_t<I, MaskKind>(s)); }...};
  return makers[kind](site);
}

}  // namespace detail

inline const KindInfo& kind_info(int kind) {
  return detail::kind_info(kind, std::make_index_sequence<kMaskKinds>());
}

// The sizes a mask needs, and its tensors in the order in which the kinds take them.
struct MaskProblem {
  const MaskSpec* spec = nullptr;
  const MaskData* data = nullptr;
  int32_t queries = 0, keys = 0;
};

class Mask {
 public:
  Mask(const MaskProblem& problem, int64_t batch, int64_t head) : program_(&problem.spec->program) {
    const MaskData* data = problem.data;
    for (const MaskLeaf& leaf : problem.spec->leaves) {
      const MaskSite site{batch, head, problem.queries, problem.keys, leaf.arguments.data(), data};
      kinds_.push_back(detail::make_kind(leaf.kind, site, std::make_index_sequence<kMaskKinds>()));
      data += kind_info(leaf.kind).data.size();
    }
  }

  Cover cover(const Tile& tile) const {
    if (program_->empty()) return Cover::all;
    return combine<Cover>([&](int leaf) { return leaf_cover(leaf, tile); });
  }

  // out[key][lane] = -1 where visible, else 0, for `Width` lanes; lanes past the tile's queries repeat the last one.
  template <int Width, class Int>
  Cover fill(const Tile& tile, Int* out) const {
    std::array<Cover, kMaxMaskLeaves> covers;
    for (size_t n = 0; n < kinds_.size(); ++n) covers[n] = leaf_cover(n, tile);
    Int any = 0, all = -1;
    for (int k = 0; k < tile.keys(); ++k, out += Width) {
      const Lanes<Width, Int> row = combine<Lanes<Width, Int>>(
          [&](int leaf) { return leaf_lanes<Width, Int>(leaf, covers[leaf], tile, tile.first_key + k); });
      for (int q = 0; q < Width; ++q) out[q] = row.bits[q];
      for (int q = 0; q < Width; ++q) any |= row.bits[q], all &= row.bits[q];
    }
    return cover_of(any, all);
  }

 private:
  template <int Width, class Int>
  struct Lanes {
    Int bits[Width];

    friend Lanes operator&(Lanes a, const Lanes& b) {
      for (int q = 0; q < Width; ++q) a.bits[q] &= b.bits[q];
      return a;
    }
    friend Lanes operator|(Lanes a, const Lanes& b) {
      for (int q = 0; q < Width; ++q) a.bits[q] |= b.bits[q];
      return a;
    }
  };

  template <class Value, class Leaf>
  Value combine(Leaf&& leaf) const {
    std::array<Value, kMaxMaskLeaves> stack;
    int top = 0;
    for (const int step : *program_) {
      if (step >= 0) {
        stack[top++] = leaf(step);
        continue;
      }
      --top;
      stack[top - 1] = step == MaskSpec::kAnd ? stack[top - 1] & stack[top] : stack[top - 1] | stack[top];
    }
    return stack[0];
  }

  Cover leaf_cover(int leaf, const Tile& tile) const {
    return std::visit([&](const auto& kind) { return kind.cover(tile); }, kinds_[leaf]);
  }

  template <int Width, class Int>
  Lanes<Width, Int> leaf_lanes(int leaf, Cover cover, const Tile& tile, int32_t j) const {
    Lanes<Width, Int> lanes;
    if (cover != Cover::some) {
      for (int q = 0; q < Width; ++q) lanes.bits[q] = cover == Cover::all ? -1 : 0;
      return lanes;
    }
    std::visit(
        [&](const auto& kind) {
          for (int q = 0; q < Width; ++q) lanes.bits[q] = -Int(kind.visible(tile.rows[q], j));
        },
        kinds_[leaf]);
    return lanes;
  }

  const std::vector<int>* program_;
  std::vector<MaskKind> kinds_;
};

}  // namespace attention_ops
