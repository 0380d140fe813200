// The gradient of a bias of any broadcast shape. A task sums the tiles of one key block over the batches and heads that
// share the bias, then writes them; a bias that broadcasts over rows or columns goes through partial sums; the tiles of
// one that nothing shares are written at once.
#pragma once
#include "kernels/cpu/backward_plan.h"
#include "kernels/cpu/score.h"

namespace attention_ops {

constexpr size_t kLeastStreamed = size_t(8) << 20;  // bytes

template <class T, int Width>
class BackwardBias {
 public:
  template <class E>
  BackwardBias(const Problem<T, E>& p, const BackwardResult<T, E>& r, const BackwardPlan& plan)
      : grad_(r.grad_bias),
        plan_(plan),
        group_(p.group()),
        queries_(p.queries),
        is_direct_(is_one_of_each(p)),
        is_streamed_(is_large_and_even()) {}

  bool on() const { return grad_.defined(); }
  void use_sums(T* sums) { sums_ = sums; }
  bool gathers_blocks() const { return on() && !is_direct_; }  // one at a time
  Index scratch_size() const { return is_direct_ ? kTileKeys * Width : on() ? slices() * slice_size() : 0; }

  void start(T* scratch) const {
    if (gathers_blocks()) std::fill_n(scratch, scratch_size(), T(0));
  }

  // scratch += ds, [keys, Width] of panel `panel` of one batch and query head, where the tile was computed
  void add(T* scratch, const ScoreTile<T>& tile, const T* ds, Index b, Index h, Index panel, Index key,
           int keys) const {
    if (is_direct_) return put(scratch, tile, ds, b, h, panel, key, keys);
    if (tile.cover == Cover::none) return;
    T* to = scratch + (slices() > 1 ? h % group_ : 0) * slice_size() + (sums_queries() ? 0 : panel) * tile_size();
    each_vector<T, Width>(tile, [&](Index n, int lane) {
      T* sum = to + (sums_keys() ? lane : n);
      store(sum, load(sum) + load(ds + n));
    });
  }

  // Writes what batch b and the heads from h on have gathered for keys key .. key + keys.
  void write(const T* scratch, Index key_group, Index query_group, Index b, Index h, Index key, int keys) const {
    for (Index slice = 0; gathers_blocks() && slice < slices(); ++slice) {
      const T* from = scratch + slice * slice_size();
      const Index bias_batch = grad_.sizes[0] == 1 ? 0 : b, bias_head = grad_.sizes[1] == 1 ? 0 : h + slice;
      if (sums_)
        add_sums(from,
                 (key_group * plan_.query_groups() + query_group) * total() +
                     (bias_batch * grad_.sizes[1] + bias_head) * grad_.sizes[2] * grad_.sizes[3],
                 query_group, key, keys);
      else
        write_block(from, query_group, bias_batch, bias_head, key, keys);
    }
    if (is_streamed_) end_streams();
  }

  // grad_bias = sum of the partial sums of all groups
  void finish() const {
    const Index groups = plan_.key_groups * plan_.query_groups(), inner = grad_.sizes[2] * grad_.sizes[3];
    with_element(grad_.element, [&]<class E>(E*) {
      for (Index n = 0; n < total(); ++n) {
        T sum = 0;
        for (Index g = 0; g < groups; ++g) sum += sums_[g * total() + n];
        const Index slice = n / inner, i = n % inner / grad_.sizes[3], j = n % grad_.sizes[3];
        *at<E>(slice / grad_.sizes[1], slice % grad_.sizes[1], i, j) = convert<E>(sum);
      }
    });
  }
  void clear_sums() const {
    if (sums_) std::fill_n(sums_, plan_.key_groups * plan_.query_groups() * total(), T(0));
  }

 private:
  bool sums_queries() const { return grad_.sizes[2] == 1; }
  bool sums_keys() const { return grad_.sizes[3] == 1; }
  Index slices() const { return grad_.sizes[1] == 1 ? 1 : group_; }
  // [panels or 1, kTileKeys or 1, Width]
  Index tile_size() const { return (sums_keys() ? 1 : kTileKeys) * Width; }
  Index slice_size() const { return (sums_queries() ? 1 : plan_.panels) * tile_size(); }
  Index total() const { return grad_.sizes[0] * grad_.sizes[1] * grad_.sizes[2] * grad_.sizes[3]; }

  template <class E>
  E* at(Index b, Index h, Index i, Index j) const {
    const Index* strides = grad_.strides;
    return static_cast<E*>(grad_.data) + b * strides[0] + h * strides[1] + i * strides[2] + j * strides[3];
  }

  template <class E>
  bool is_one_of_each(const Problem<T, E>& p) const {
    const Index sizes[4] = {p.batch, p.heads, p.queries, p.keys};
    return on() && !sums_queries() && !sums_keys() && std::equal(sizes, sizes + 4, grad_.sizes);
  }

  // Whether it is more than most caches keep, and its rows are whole lines of memory.
  bool is_large_and_even() const {
    if (!on() || sums_queries() || grad_.strides[3] != 1) return false;
    bool is_even = reinterpret_cast<uintptr_t>(grad_.data) % kLine == 0;
    size_t bytes = 0;
    with_element(grad_.element, [&]<class E>(E*) {
      bytes = size_t(total()) * sizeof(E);
      for (int axis = 0; axis < 3; ++axis) is_even = is_even && grad_.strides[axis] * sizeof(E) % kLine == 0;
    });
    return is_even && bytes >= kLeastStreamed;
  }

  // A tile of which a part, or nothing, was computed is zero elsewhere.
  void put(T* scratch, const ScoreTile<T>& tile, const T* ds, Index b, Index h, Index panel, Index key,
           int keys) const {
    if (tile.cover == Cover::all) return write_tile(ds, b, h, panel, key, keys);
    std::fill_n(scratch, Index(keys) * Width, T(0));
    if (tile.cover == Cover::some) each_vector<T, Width>(tile, [&](Index n, int) { store(scratch + n, load(ds + n)); });
    write_tile(scratch, b, h, panel, key, keys);
  }

  void write_block(const T* from, Index query_group, Index b, Index h, Index key, int keys) const {
    const auto [first, last] = plan_.panels_of(query_group);
    for (Index panel = first; panel < last; ++panel) write_tile(from + panel * tile_size(), b, h, panel, key, keys);
  }

  void write_tile(const T* from, Index b, Index h, Index panel, Index key, int keys) const {
    const int rows = int(std::min<Index>(Width, queries_ - panel * Width));
    T ones[Width];
    std::fill_n(ones, Width, T(1));
    with_element(grad_.element, [&]<class E>(E*) {
      lanes_to_rows(from, Width, ones, rows, keys, [&](int r, Index k, Vec<T> x, int n) {
        E* to = at<E>(b, h, panel * Width + r, key + k);
        if constexpr (std::is_same_v<T, Wide<E>>)
          if (grad_.strides[3] == 1) return is_streamed_ ? stream_elements(to, x, n) : write_elements(to, x, n);
        for (int c = 0; c < n; ++c) to[c * grad_.strides[3]] = convert<E>(x[c]);
      });
    });
  }

  void add_sums(const T* from, Index offset, Index query_group, Index key, int keys) const {
    T* sums = sums_ + offset;
    const auto [first, last] = plan_.panels_of(query_group);
    for (int k = 0; k < (sums_keys() ? 1 : keys); ++k) {
      T* line = sums + (sums_keys() ? 0 : key + k);
      const T* tile = from + k * Width;
      if (sums_queries())
        for (int q = 0; q < Width; ++q) *line += tile[q];
      else  // the bias has one column
        for (Index i = first * Width; i < std::min(last * Width, queries_); ++i) line[i] += tile[i];
    }
  }

  Tensor4 grad_;
  BackwardPlan plan_;
  Index group_, queries_;
  bool is_direct_, is_streamed_;
  T* sums_ = nullptr;
};

}  // namespace attention_ops
