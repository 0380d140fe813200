// Forward in plain arithmetic where few rows see many keys, and reading k and v is the limit. All rows of a key head
// are worked on together, so that k and v are read once. Keys are cut into chunks, each a block that gives m, l and o
// of its keys (simt_forward.cuh); then m = max m_c, l = sum 2^(m_c - m) l_c, o = sum 2^(m_c - m) o_c / l in the chunks'
// order.
#pragma once
#include "kernels/cuda/simt_tile.cuh"

namespace attention_ops {

constexpr int kDecodeThreads = 128, kDecodeWarps = kDecodeThreads / 32, kDecodeTile = 64;
constexpr int kDecodePasses = int(kDecodeColumns) / kDecodeThreads;  // columns of the values that a thread owns

// The rows of one batch and key head: those of its query heads in turn.
struct DecodeHead {
  const Problem& of;
  Index b, key_head;

  DEVICE int rows() const { return int(of.group() * of.queries); }
  DEVICE Site site(int row) const { return {of, b, key_head * of.group() + row / int(of.queries)}; }
  DEVICE Index query(int row) const { return row % int(of.queries); }

  DEVICE Cover cover(Index key) const {
    Cover least = Cover::all, most = Cover::none;
    for (Index h = key_head * of.group(); h < (key_head + 1) * of.group(); ++h) {
      const Cover c = Site{of, b, h}.cover(0, of.queries, key, kDecodeTile);
      least = least & c, most = most | c;
    }
    return cover_of(most != Cover::none, least == Cover::all);
  }
};

// A block's shared memory for R rows.
template <class T, int R>
struct DecodeMemory {
  static constexpr int kStride = R | 1;  // odd, against bank conflicts
  static constexpr int kWords = kDecodeTile / 32, kBits = R * kWords * 4;
  static constexpr int kScores = R * kDecodeTile * int(sizeof(T)), kWeights = kStride * kDecodeTile * int(sizeof(T));
  static constexpr int kFactors = R * int(sizeof(T)), kSums = kDecodeThreads * int(sizeof(T));
  static constexpr int kQueries = kScores + kWeights + kFactors + kSums + 2 * kBits;

  static int bytes(Index width) { return kQueries + R * int(width) * int(sizeof(T)); }

  device::Shared<T> s = device::shared<T>(0);                                         // [R, kDecodeTile]
  device::Shared<T> p = device::shared<T>(kScores);                                   // [kDecodeTile, kStride]
  device::Shared<T> alpha = device::shared<T>(kScores + kWeights);                    // [R]
  device::Shared<T> sums = device::shared<T>(kScores + kWeights + kFactors);          // [kDecodeThreads]
  device::Shared<uint32_t> visible = device::shared<uint32_t>(kQueries - 2 * kBits);  // [R, kWords]
  device::Shared<uint32_t> kept = device::shared<uint32_t>(kQueries - kBits);
  device::Shared<T> q = device::shared<T>(kQueries);  // [R, D]

  static DEVICE bool bit(const device::Shared<uint32_t>& bits, int row, int key) {
    return bits[row * kWords + key / 32] >> (key % 32) & 1;
  }
};

// One chunk of keys and all its rows, of which there are at most R.
template <class T, int R>
class DecodeBlock {
 public:
  DEVICE DecodeBlock(const DecodeHead& head, Index part) : head_(head) {
    const Index left = head.of.value_width - part * kDecodeColumns;
    first_column_ = part * kDecodeColumns, width_ = int(left < kDecodeColumns ? left : kDecodeColumns);
    while (columns_ < width_ && columns_ < kDecodeThreads) columns_ *= 2;
    for (auto& row : o_)
      for (T& x : row) x = 0;
    for (int n = 0; n < kRowsOfWarp; ++n) m_[n] = -kInfinity<T>, l_[n] = 0;
  }

  DEVICE void run(Index start, Index end) {
    load_queries();
    const auto cover = [&](int n) { return head_.cover(start + n * kDecodeTile); };
    const int count = int((end - start + kDecodeTile - 1) / kDecodeTile);
    for (VisibleTiles tiles(count, cover); !tiles.done(); tiles.next()) {
      const Index key = start + tiles.tile() * kDecodeTile;
      const bool some = !tiles.whole();
      device::sync_threads();  // the last tile's readers are done
      fill_tile_bits(key, some);
      multiply_queries(key);
      device::sync_threads();
      update_rows(key, some);
      device::sync_threads();
      some ? add_values<true>(key) : add_values<false>(key);
    }
  }

  // `first` is the place of the chunk's first row among all.
  DEVICE void store(const DecodePlan& plan, Index first) const {
    for (int n = 0; n < kRowsOfWarp; ++n) {
      const int row = row_of_warp(n);
      if (first_column_ > 0 || lane() > 0 || row >= head_.rows()) continue;
      device::store(static_cast<T*>(plan.m) + first + row, m_[n]);
      device::store(static_cast<T*>(plan.l) + first + row, l_[n]);
    }
    for (int r = 0; r < R; ++r)
      if (r < head_.rows())
        for (int c = 0; c < kDecodePasses; ++c)
          store_column(static_cast<T*>(plan.o) + (first + r) * head_.of.value_width + first_column_, c, o_[r][c]);
  }

 private:
  static constexpr int kRowsOfWarp = (R + kDecodeWarps - 1) / kDecodeWarps;

  static DEVICE int lane() { return device::thread() % 32; }
  static DEVICE int row_of_warp(int n) { return device::thread() / 32 + n * kDecodeWarps; }
  // In the values, threads stand side by side in as many slots as there is room for, which share the keys of a tile.
  DEVICE int slots() const { return kDecodeThreads / columns_; }
  DEVICE int slot() const { return device::thread() / columns_; }
  DEVICE int column(int pass) const { return device::thread() % columns_ + pass * kDecodeThreads; }

  DEVICE void load_queries() const {
    const int width = int(head_.of.width);
    for (int n = device::thread(); n < R * width; n += kDecodeThreads) {
      const int row = n / width;
      memory_.q[n] = row < head_.rows() ? head_.site(row).q(head_.query(row)).template get<T>(0, n % width) : T(0);
    }
  }

  DEVICE void fill_tile_bits(Index key, bool some) const {
    const auto fill = [&](const device::Shared<uint32_t>& bits, auto&& word) {
      fill_bits<kDecodeThreads>(bits, R, kDecodeTile,
                                [&](int r, int j) { return r < head_.rows() ? word(head_.site(r), r, j) : 0u; });
    };
    if (some)
      fill(memory_.visible, [&](const Site& site, int r, int j) { return site.visible(head_.query(r), key + j); });
    if (head_.of.dropout.on())
      fill(memory_.kept,
           [&](const Site& site, int r, int j) { return kept_bits(site.dropout(), head_.query(r), key + j); });
  }

  // s = q k': eight lanes share a key, and each takes four keys at a time. Past the last key it is the last one's.
  DEVICE void multiply_queries(Index key) const {
    constexpr int kLanes = 8, kEach = 4;
    const int part = device::thread() % kLanes, first = device::thread() / kLanes * kEach, width = int(head_.of.width);
    const Rows k = Site{head_.of, head_.b, head_.key_head * head_.of.group()}.k(key);
    T acc[R][kEach] = {};
    with_stored<T>(k.of->element, [&]<class E>(E*) {
      const E* row[kEach];
      for (int n = 0; n < kEach; ++n) row[n] = k.pointer<E>(first + n < k.count ? first + n : k.count - 1, part);
#pragma unroll 4
      for (int d = part; d < width; d += kLanes) {
        T x[kEach];
        for (int n = 0; n < kEach; ++n) x[n] = convert<T>(device::load(row[n])), row[n] += kLanes * k.of->strides[3];
        for (int r = 0; r < R; ++r) {
          const T q = memory_.q[r * width + d];
          for (int n = 0; n < kEach; ++n) acc[r][n] += q * x[n];
        }
      }
    });
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < kEach; ++n) {
        for (int other = kLanes / 2; other > 0; other /= 2) acc[r][n] += device::shuffle_xor(acc[r][n], other);
        if (part == 0) memory_.s[r * kDecodeTile + first + n] = acc[r][n];
      }
  }

  // m' = max(m, s), alpha = 2^(m - m'), p = 2^(s - m'), l := alpha l + sum p, then dropout. A warp takes a row at a
  // time.
  DEVICE void update_rows(Index key, bool some) {
    for (int n = 0; n < kRowsOfWarp; ++n) {
      const int row = row_of_warp(n);
      if (row >= R) continue;
      T s[kDecodeTile / 32], tanh, top = m_[n], sum = 0;
      for (int c = 0; c < kDecodeTile / 32; ++c) {
        const int j = lane() + 32 * c;
        const bool visible = row < head_.rows() && (!some || memory_.bit(memory_.visible, row, j));
        s[c] = memory_.s[row * kDecodeTile + j];
        finish_score(s[c], tanh, visible, head_.site(row), head_.query(row), key + j);
        top = s[c] > top ? s[c] : top;
      }
      top = row_max<32>(top);
      const T base = top > -kInfinity<T> ? top : T(0);  // nothing visible yet
      const T alpha = m_[n] == base ? T(1) : device::exp2(m_[n] - base);
      for (int c = 0; c < kDecodeTile / 32; ++c) {
        const int j = lane() + 32 * c;
        const bool kept = !head_.of.dropout.on() || memory_.bit(memory_.kept, row, j);
        const T p = device::exp2(s[c] - base);
        sum += p;
        memory_.p[j * memory_.kStride + row] = kept ? p : T(0);
      }
      m_[n] = top, l_[n] = alpha * l_[n] + row_sum<32>(sum);
      if (lane() == 0) memory_.alpha[row] = alpha;
    }
  }

  // o := alpha o + p v. Hidden places may hold anything: where some are, only visible pairs are multiplied.
  template <bool Some>
  DEVICE void add_values(Index key) {
    for (int r = 0; r < R; ++r) {
      const T alpha = memory_.alpha[r];
      for (T& x : o_[r]) x *= alpha;
    }
    const Rows v = Site{head_.of, head_.b, head_.key_head * head_.of.group()}.v(key);
    const int keys = v.count < kDecodeTile ? int(v.count) : kDecodeTile;
    with_stored<T>(v.of->element, [&]<class E>(E*) {
#pragma unroll 4
      for (int j = slot(); j < keys; j += slots()) {
        T x[kDecodePasses] = {};
        for (int c = 0; c < kDecodePasses; ++c)
          if (column(c) < width_) x[c] = convert<T>(device::load(v.pointer<E>(j, first_column_ + column(c))));
        for (int r = 0; r < R; ++r) {
          if (Some && !memory_.bit(memory_.visible, r, j)) continue;
          const T p = memory_.p[j * memory_.kStride + r];
          for (int c = 0; c < kDecodePasses; ++c) o_[r][c] += p * x[c];
        }
      }
    });
  }

  // The sum of the slots' parts of a column.
  DEVICE void store_column(T* o, int pass, T x) const {
    if (slots() > 1) {
      device::sync_threads();
      memory_.sums[device::thread()] = x;
      device::sync_threads();
    }
    if (slot() > 0 || column(pass) >= width_) return;
    for (int n = 1; n < slots(); ++n) x += memory_.sums[device::thread() + n * columns_];
    device::store(o + column(pass), x);
  }

  DecodeHead head_;
  DecodeMemory<T, R> memory_;
  Index first_column_;
  int width_, columns_ = 32;  // of this block's part of the values; how many threads take them
  T o_[R][kDecodePasses], m_[kRowsOfWarp], l_[kRowsOfWarp];
};

template <class T, int R>
__global__ void __launch_bounds__(kDecodeThreads, sizeof(T) == 4 ? 3 : 1)
    simt_decode_kernel(const __grid_constant__ Problem p, const __grid_constant__ DecodePlan plan, Index tasks) {
  for (Index task = device::block(); task < tasks; task += device::blocks()) {
    const Index slice = task / plan.parts, chunk = slice % plan.chunks, head = slice / plan.chunks;
    const Index start = chunk * kDecodeChunk, end = start + kDecodeChunk < p.keys ? start + kDecodeChunk : p.keys;
    DecodeBlock<T, R> block({p, head / p.key_heads, head % p.key_heads}, task % plan.parts);
    block.run(start, end);
    block.store(plan, slice * plan.rows);
  }
}

// Merges the chunks of one row; a block takes a row at a time.
template <class T>
__global__ void __launch_bounds__(kDecodeThreads)
    simt_merge_kernel(const __grid_constant__ Problem p, const __grid_constant__ DecodePlan plan,
                      const __grid_constant__ ForwardResult result, Index tasks) {
  for (Index task = device::block(); task < tasks; task += device::blocks()) {
    const Index query = task % p.queries, h = task / p.queries % p.heads, b = task / p.queries / p.heads;
    const Site site{p, b, h};
    const Index first = (b * p.key_heads + h / p.group()) * plan.chunks, row = h % p.group() * p.queries + query;
    const auto place = [&](Index chunk) { return (first + chunk) * plan.rows + row; };
    const T sink = site.template sink<T>();
    T m = sink;
    for (Index c = 0; c < plan.chunks; ++c) {
      const T other = row_value<T>(plan.m, place(c));
      m = other > m ? other : m;
    }
    const T base = m > -kInfinity<T> ? m : T(0);
    const auto factor = [&](T from) { return from == base ? T(1) : device::exp2(from - base); };
    T l = sink != -kInfinity<T> ? factor(sink) : T(0);
    for (Index c = 0; c < plan.chunks; ++c)
      l += factor(row_value<T>(plan.m, place(c))) * row_value<T>(plan.l, place(c));
    const T inverse = l == 0 ? T(0) : T(p.dropout.scale) / l;
    for (Index d = device::thread(); d < p.value_width; d += kDecodeThreads) {
      T o = 0;
      for (Index c = 0; c < plan.chunks; ++c)
        o += factor(row_value<T>(plan.m, place(c))) * row_value<T>(plan.o, place(c) * p.value_width + d);
      site.queries_of(result.out, query).put(0, d, o * inverse);
    }
    const T lse = l == 0 ? -kInfinity<T> : (m + device::log2(l)) * kLn2<T>;
    if (device::thread() == 0) put_row_value(result.lse, site.row_of(query), lse);
  }
}

}  // namespace attention_ops
