// Walks over the tiles of a line of the score matrix that have a visible element.
#pragma once
#include "kernels/cuda/device.h"
#include "kernels/mask/tile.h"

namespace attention_ops {

// Walks over the tiles 0 .. count - 1 of a line and stops where something is visible. Each lane of a warp asks for one
// tile's cover, so that a mask that must read its tensors to know does it for 32 tiles in the time of one. Every warp
// finds the same tiles.
template <class CoverOf>
class VisibleTiles {
 public:
  DEVICE VisibleTiles(int count, const CoverOf& cover_of) : count_(count), cover_of_(cover_of) { next(); }

  DEVICE bool done() const { return tile_ >= count_; }
  DEVICE int tile() const { return tile_; }
  DEVICE bool whole() const { return all_ >> (tile_ - first_) & 1; }  // every element is visible
  DEVICE void next() {
    while (any_ == 0) {
      first_ += 32;
      if (first_ >= count_) {
        tile_ = count_;
        return;
      }
      const int mine = first_ + device::thread() % 32;
      const Cover cover = mine < count_ ? cover_of_(mine) : Cover::none;
      any_ = device::ballot(cover != Cover::none);
      all_ = device::ballot(cover == Cover::all);
    }
    tile_ = first_ + device::first_bit(any_);
    any_ &= any_ - 1;
  }

 private:
  int count_, first_ = -32, tile_ = 0;
  uint32_t any_ = 0, all_ = 0;
  CoverOf cover_of_;
};

}  // namespace attention_ops
