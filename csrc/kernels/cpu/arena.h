// Scratch memory of kernels: one block, handed out in aligned pieces.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <new>

#include "kernels/view.h"

namespace attention_ops {

#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kMostKept = 0;  // every block has its own end, so that a step past it is seen
#else
constexpr size_t kMostKept = size_t(64) << 20;
#endif

constexpr size_t kLargePages = size_t(8) << 20;  // from here on they are worth asking for

// Memory that is new to a process costs a page fault for every 4 KiB, which takes three times as long as to fill it.
// Where Linux has larger pages to give, it is asked for them; `data` may be any memory of ours or of an allocator's.
inline void want_large_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr size_t kPage = 4096;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(data) + bytes) / kPage * kPage;
  if (bytes >= kLargePages)
    madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // a hint: it may fail
#endif
}

struct alignas(64) Block {
  size_t bytes;  // that follow

  char* data() { return reinterpret_cast<char*>(this + 1); }

  static Block* make(size_t bytes) {
    Block* block = new (::operator new(sizeof(Block) + bytes, std::align_val_t(alignof(Block)))) Block{bytes};
    want_large_pages(block->data(), bytes);
    return block;
  }
  static void free(Block* block) { ::operator delete(block, std::align_val_t(alignof(Block))); }
};

// A place for one block, the largest given back, which is kept for whichever thread asks next: new ones cost a fifth of
// a small backward pass.
template <size_t Most>
class KeptBlock {
 public:
  Block* take(size_t bytes) {
    Block* block = kept_.exchange(nullptr, std::memory_order_acquire);
    if (block && block->bytes >= bytes) return block;
    Block::free(block);
    return Block::make(bytes);
  }
  void give(Block* block) {
    if (block->bytes > std::min(Most, kMostKept)) return Block::free(block);
    for (Block* other; (other = kept_.exchange(block, std::memory_order_acq_rel)); block = other)
      if (other->bytes <= block->bytes) return Block::free(other);
  }

 private:
  std::atomic<Block*> kept_{nullptr};
};

// Sizes are counted first, so that there is one block.
class Arena {
 public:
  explicit Arena(size_t bytes) : block_(kept.take(bytes)), next_(block_->data()) {}
  ~Arena() { kept.give(block_); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  void reset() { next_ = block_->data(); }
  char* mark() const { return next_; }
  void reset(char* mark) { next_ = mark; }
  template <class E>
  E* take(Index count) {
    E* piece = reinterpret_cast<E*>(next_);
    next_ += rounded<E>(count);
    return piece;
  }
  template <class E>
  static size_t rounded(Index count) {
    return (size_t(count) * sizeof(E) + alignof(Block) - 1) / alignof(Block) * alignof(Block);
  }

 private:
  static inline KeptBlock<kMostKept> kept;

  Block* block_;
  char* next_;
};

// Takes pieces from an arena, or only counts them.
class Pieces {
 public:
  explicit Pieces(Arena* arena = nullptr) : arena_(arena) {}
  template <class E>
  void operator()(E*& piece, Index count) {
    bytes += Arena::rounded<E>(count);
    if (arena_) piece = arena_->take<E>(count);
  }
  size_t bytes = 0;

 private:
  Arena* arena_;
};

}  // namespace attention_ops
