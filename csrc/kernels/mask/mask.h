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
    std::array<Cover, kMaxMaskLeaves> stack;
    int top = 0;
    for (const int step : *program_) {
      if (step >= 0) {
        stack[top++] = leaf_cover(step, tile);
        continue;
      }
      --top;
      stack[top - 1] = step == MaskSpec::kAnd ? stack[top - 1] & stack[top] : stack[top - 1] | stack[top];
    }
    return stack[0];
  }

  // out[key][lane] = -1 where visible, else 0, for `Width` lanes; lanes past the tile's queries repeat the last one.
  // `spare` holds operands that wait, `spare_step` apart.
  template <int Width, class Int>
  void fill(const Tile& tile, Int* out, Int* spare, int64_t spare_step) const {
    const auto operand = [&](int n) { return n == 0 ? out : spare + (n - 1) * spare_step; };
    int top = 0;
    for (const int step : *program_) {
      if (step >= 0) {
        fill_leaf<Width>(step, tile, operand(top++));
        continue;
      }
      --top;
      Int *a = operand(top - 1), *b = operand(top);
      const int64_t size = int64_t(tile.keys()) * Width;
      if (step == MaskSpec::kAnd)
        for (int64_t n = 0; n < size; ++n) a[n] &= b[n];
      else
        for (int64_t n = 0; n < size; ++n) a[n] |= b[n];
    }
  }

 private:
  Cover leaf_cover(int leaf, const Tile& tile) const {
    return std::visit([&](const auto& kind) { return kind.cover(tile); }, kinds_[leaf]);
  }

  template <int Width, class Int>
  void fill_leaf(int leaf, const Tile& tile, Int* out) const {
    std::visit(
        [&](auto kind) {  // a copy: its members then stay in registers
          if (const Cover cover = kind.cover(tile); cover != Cover::some) {
            std::fill_n(out, int64_t(tile.keys()) * Width, cover == Cover::all ? Int(-1) : Int(0));
            return;
          }
          int32_t rows[Width];
          std::copy_n(tile.rows, Width, rows);
          for (int32_t j = tile.first_key; j <= tile.last_key; ++j, out += Width)
            for (int q = 0; q < Width; ++q) out[q] = -Int(kind.visible(rows[q], j));
        },
        kinds_[leaf]);
  }

  const std::vector<int>* program_;
  std::vector<MaskKind> kinds_;
};

}  // namespace attention_ops
