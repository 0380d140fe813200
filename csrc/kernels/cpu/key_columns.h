// Columns of keys and values, for products of pairs that sum over keys.
#pragma once
#include "kernels/cpu/pairs.h"
#include "kernels/cpu/problem.h"

namespace attention_ops {

// The columns of keys or values as rows, in blocks of one tile: [B, H, blocks, columns, kTileKeys], zero past the last
// key, and zero for what is not finite. Products that sum over keys read them. take() finds them a place in an arena.
template <class E>
class KeyColumns {
 public:
  KeyColumns(const Matrices<const E>&, Index, Index, Index, Index) {}
  void take(Pieces&) {}
  Index tasks() const { return 0; }
  void pack(Index) const {}
};

template <>
class KeyColumns<BFloat16> {
 public:
  KeyColumns(const Matrices<const BFloat16>& rows, Index batch, Index heads, Index keys, Index width)
      : rows_(rows), batch_(batch), heads_(heads), keys_(keys), width_(width) {}

  void take(Pieces& pieces) { pieces(data_, tasks() * block_size()), pieces(finite_, tasks()); }

  Index tasks() const { return batch_ * heads_ * blocks(); }
  void pack(Index task) const {
    constexpr int kPairsOfKeys = kTileKeys / 2;
    const Index block = task % blocks(), head = task / blocks(), key = block * kTileKeys;
    const BFloat16* from = rows_.at(head / heads_, head % heads_) + key * rows_.row_stride;
    BFloat16* to = data_ + task * block_size();
    const Index count = std::min<Index>(kTileKeys, keys_ - key);
    float* lanes = reinterpret_cast<float*>(to);  // a pair moves as one number of 32 bits
    transpose_to_lanes(lanes, kPairsOfKeys, kPairsOfKeys, width_, [&](int pair, Index c, int n) {
      const auto row = [&](Index k) { return k < count ? load_halves(from + k * rows_.row_stride + c, n) : Halves{}; };
      return std::bit_cast<Vec<float>>(interleave(finite_part(row(2 * pair)), finite_part(row(2 * pair + 1))));
    });
    std::fill(to + width_ * kTileKeys, to + block_size(), BFloat16{});
    finite_[task] = all_finite<float>(from, rows_.row_stride, count, width_);
  }
  // From the tile that begins at `key` on.
  PiecedRows at(Index b, Index h, Index key) const {
    static_assert(kTileKeys == PiecedRows::kPiece);
    return {data_ + number(b, h, key) * block_size(), kTileKeys, block_size()};
  }
  bool finite(Index b, Index h, Index key) const { return finite_[number(b, h, key)]; }

 private:
  Index blocks() const { return (keys_ + kTileKeys - 1) / kTileKeys; }
  Index number(Index b, Index h, Index key) const { return (b * heads_ + h) * blocks() + key / kTileKeys; }
  Index block_size() const { return round_up(width_, kPairRows) * kTileKeys; }

  Matrices<const BFloat16> rows_;
  Index batch_, heads_, keys_, width_;
  BFloat16* data_ = nullptr;
  bool* finite_ = nullptr;
};

}  // namespace attention_ops
