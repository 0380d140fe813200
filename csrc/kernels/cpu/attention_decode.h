// Forward where few rows see many keys, as in decoding, and reading k and v is the limit. All rows of a key head are
// worked on together, as many at a time as fill a vector, so that k and v are read once for those. Keys are cut into
// chunks, each a task that gives m, l and o of its keys (attention_forward.h); then m = max m_c, l = sum 2^(m_c - m)
// l_c, o = sum 2^(m_c - m) o_c / l in the chunks' order. Chunks depend on the number of keys alone, so results do not
// depend on the number of threads.
#pragma once
#include <vector>

#include "kernels/cpu/attention_forward.h"
#include "kernels/cpu/decode_products.h"
#include "kernels/decode.h"

namespace attention_ops {

// Keys of a chunk: longer ones cost less to begin, but are fewer tasks.
constexpr Index kLeastChunk = 512, kMostChunk = 2048, kChunks = 16;

// One row of a panel.
template <class T>
struct DecodeRow {
  Site<T> site;
  int32_t query;

  Tile tile(Index key, Index keys) const { return {&query, 1, query, query, int32_t(key), int32_t(key + keys - 1)}; }
};

// The problem's own k and v are not looked at: E is the type that they are stored in.
template <class E>
class AttentionDecode {
 public:
  using T = Wide<E>;

  AttentionDecode(const Problem<T>& problem, const Matrices<const E>& k, const Matrices<const E>& v,
                  const ForwardResult<T>& result)
      : p_(problem),
        k_(k),
        v_(v),
        result_(result),
        rows_(problem.group() * problem.queries),
        chunk_(std::clamp(round_up((problem.keys + kChunks - 1) / kChunks, kTileKeys), kLeastChunk, kMostChunk)),
        chunks_((problem.keys + chunk_ - 1) / chunk_),
        parts_(size_t(tasks() * rows_ * part_size())) {}

  // As if an element of k or v that is read cost so many multiplications with it.
  double operations() const {
    return p_.pair_operations() + 16.0 * p_.batch * p_.key_heads * p_.keys * (p_.width + p_.value_width);
  }
  Index tasks() const { return p_.batch * p_.key_heads * chunks_; }
  size_t scratch_bytes() const {
    Scratch scratch;
    Pieces count;
    scratch.take(count, p_);
    return count.bytes;
  }
  void run(Index task, Arena& arena) const {
    Scratch scratch;
    Pieces pieces(&arena);
    scratch.take(pieces, p_);
    for (Index first = 0; first < rows_; first += kStep) {
      const int count = int(std::min<Index>(kStep, rows_ - first));
      with_rows(count, [&](auto rows) { run_panel<rows>(scratch, task, first, count); });
    }
  }
  Index finish_tasks() const { return p_.batch * p_.heads; }
  void finish(Index task) const;

 private:
  static constexpr int kStep = kLanes<T>;

  static Index column_at(Index n) { return n / kElements<E> * kElements<E> + element_in<E>(int(n % kElements<E>)); }

  // m, then l, then o[value_width] of a row and chunk
  Index part_size() const { return 2 + p_.value_width; }
  T* part(Index task, Index row) const { return parts_.data() + (task * rows_ + row) * part_size(); }

  static Index padded(Index width) { return (width + kElements<E> - 1) / kElements<E> * kElements<E>; }

  struct Scratch {
    T *q = nullptr, *o = nullptr;  // [R, padded width], columns in the order of load_widened (q: of multiply_queries)
    T *k_block = nullptr, *alpha = nullptr, *column = nullptr;
    E* v = nullptr;  // [kTileKeys, padded width], where values are not whole vectors
    LaneInt<T>*keep = nullptr, *visible_column = nullptr;
    ScoreTile<T> tile;  // [kTileKeys, R]

    void take(Pieces& pieces, const Problem<T>& p) {
      pieces(q, kStep * padded(p.width)), pieces(o, kStep * padded(p.value_width)), pieces(alpha, kStep);
      pieces(column, kTileKeys), pieces(visible_column, kTileKeys);
      pieces(k_block, kBlockKeys * padded(p.width));
      if (p.value_width != padded(p.value_width)) pieces(v, kTileKeys * padded(p.value_width));
      if (p.dropout.on()) pieces(keep, kTileKeys * kStep);
      tile.take(pieces, p, kStep, /*derivatives=*/false);
    }
  };
  // The softmax so far. A lane holds row (lane % R) of the panel; m is the same in all lanes of a row, l is not.
  struct Sums {
    Vec<T> m = splat(-kInfinity<T>), l{};
  };
  using Rows = std::vector<DecodeRow<T>>;

  template <int R = kStep, class F>
  static void with_rows(int count, F&& f) {
    if constexpr (R > 1)
      if (count <= R / 2) return with_rows<R / 2>(count, f);
    f(std::integral_constant<int, R>());
  }

  template <int R>
  void run_panel(Scratch& w, Index task, Index first, int count) const;
  template <int R>
  void load_queries(Scratch& w, const Rows& rows) const;
  Cover cover(const Rows& rows, Index key, Index keys) const;
  template <int R>
  void fill_visible(Scratch& w, const Rows& rows, Index key, int keys) const;
  template <int R>
  void fill_bias(Scratch& w, const Rows& rows, Index key, int keys) const;
  template <int R>
  void fill_kept(Scratch& w, const Rows& rows, Index key) const;
  template <int R>
  void compute_scores(Scratch& w, const StoredRows<E>& k, int keys) const;
  template <int R>
  void update_softmax(Scratch& w, Sums& sums) const;
  template <int R>
  void add_visible_values(const Scratch& w, int rows, const StoredRows<E>& v, int keys) const;
  StoredRows<E> whole_rows(E* copy, const StoredRows<E>& v, int keys) const;
  template <int R>
  void run_tile(Scratch& w, Sums& sums, const Rows& rows, Index key, int keys) const;
  T finish_row(Index first, Index row, T sink, T* out) const;

  const Problem<T>& p_;
  Matrices<const E> k_, v_;
  ForwardResult<T> result_;
  Index rows_, chunk_, chunks_;   // keys of a chunk, chunks of a head
  mutable std::vector<T> parts_;  // [tasks, rows, part size]
};

template <class E>
template <int R>
void AttentionDecode<E>::run_panel(Scratch& w, Index task, Index first, int count) const {
  const Index b = task / chunks_ / p_.key_heads, hk = task / chunks_ % p_.key_heads;
  Rows rows;
  rows.reserve(count);
  Index head = hk * p_.group() + first / p_.queries, query = first % p_.queries;
  for (; Index(rows.size()) < count; ++head, query = 0) {
    const Site<T> site(p_, b, head);
    for (; query < p_.queries && Index(rows.size()) < count; ++query) rows.push_back({site, int32_t(query)});
  }
  load_queries<R>(w, rows);
  std::fill_n(w.o, R * padded(p_.value_width), T(0));
  Sums sums;
  const Index start = task % chunks_ * chunk_, end = std::min(start + chunk_, p_.keys);
  const Cover whole = cover(rows, start, end - start);
  for (Index key = start; key < end && whole != Cover::none; key += kTileKeys) {
    const int keys = int(std::min<Index>(kTileKeys, end - key));
    w.tile.cover = whole == Cover::all ? whole : cover(rows, key, keys);
    if (w.tile.cover != Cover::none) run_tile<R>(w, sums, rows, key, keys);
  }
  for (int r = 0; r < count; ++r) {
    T* to = part(task, first + r);
    to[0] = sums.m[r], to[1] = 0;
    for (int lane = r; lane < kStep; lane += R) to[1] += sums.l[lane];
    const T* o = w.o + r * padded(p_.value_width);
    for (Index n = 0; n < padded(p_.value_width); ++n)
      if (const Index d = column_at(n); d < p_.value_width) to[2 + d] = o[n];
  }
}

// q times its factor, as multiply_queries wants it.
template <class E>
template <int R>
void AttentionDecode<E>::load_queries(Scratch& w, const Rows& rows) const {
  constexpr int kGroup = kStep / R;
  std::fill_n(w.q, R * padded(p_.width), T(0));
  for (size_t r = 0; r < rows.size(); ++r) {
    const T* q = rows[r].site.q + rows[r].query * p_.q.row_stride;
    for (Index n = 0; n < padded(p_.width); ++n)
      if (const Index d = column_at(n); d < p_.width)
        w.q[(n / kGroup * R + Index(r)) * kGroup + n % kGroup] = p_.query_factor() * q[d];
  }
}

template <class E>
Cover AttentionDecode<E>::cover(const Rows& rows, Index key, Index keys) const {
  Cover least = Cover::all, most = Cover::none;
  for (const DecodeRow<T>& row : rows) {
    const Cover c = row.site.mask.cover(row.tile(key, keys));
    least = least & c, most = most | c;
  }
  return cover_of(most != Cover::none, least == Cover::all);
}

template <class E>
template <int R>
void AttentionDecode<E>::fill_visible(Scratch& w, const Rows& rows, Index key, int keys) const {
  for (size_t r = 0; r < rows.size(); ++r) {
    rows[r].site.mask.template fill<1>(rows[r].tile(key, keys), w.visible_column, w.tile.spare, kTileKeys);
    for (int k = 0; k < keys; ++k) w.tile.visible[k * R + r] = w.visible_column[k];
  }
}

template <class E>
template <int R>
void AttentionDecode<E>::fill_bias(Scratch& w, const Rows& rows, Index key, int keys) const {
  std::fill_n(w.tile.bias, kTileKeys * R, T(0));
  for (size_t r = 0; r < rows.size(); ++r) {
    std::fill_n(w.column, kTileKeys, T(0));
    const auto add = [&]<class B>(const B* from, Index stride) {
      for (int k = 0; k < keys; k += kStep)
        store(w.column + k,
              sum_of_biases<T>(load(w.column + k),
                               scaled_bias<T>(read_elements<T>(from + k * stride, stride, std::min(kStep, keys - k)))));
    };
    const Index b = rows[r].site.b, h = rows[r].site.h, i = rows[r].query;
    const Tensor4& x = p_.bias;
    const Index first = b * x.strides[0] + h * x.strides[1] + i * x.strides[2] + key * x.strides[3];
    if (x.defined())
      with_element(x.element, [&]<class B>(B*) { add(static_cast<const B*>(x.data) + first, x.strides[3]); });
    if (p_.distance.defined()) add(p_.distance.row(b, h, key - i + p_.queries - 1), p_.distance.rows.row_stride);
    for (int k = 0; k < keys; ++k) w.tile.bias[k * R + r] = w.column[k];
  }
}

template <class E>
template <int R>
void AttentionDecode<E>::fill_kept(Scratch& w, const Rows& rows, Index key) const {
  for (size_t r = 0; r < rows.size(); ++r)
    for (int group = 0; group < kTileKeys / 8; ++group) {
      const DropoutStream& stream = rows[r].site.dropout;
      const Philox bits = stream.eight(uint32_t(rows[r].query), uint32_t(key / 8 + group));
      for (int n = 0; n < 8; ++n) w.keep[(group * 8 + n) * R + r] = -LaneInt<T>(stream.keeps(bits, n));
    }
}

// The tile's s as score.h has it, in whole vectors: places past the last key are minus infinity.
template <class E>
template <int R>
void AttentionDecode<E>::compute_scores(Scratch& w, const StoredRows<E>& k, int keys) const {
  RowsAhead ahead(StoredRows<E>{k.at(kTileKeys, 0), k.stride}, p_.width);
  for (int key = 0; key < keys; key += kBlockKeys) {
    pack_keys<E>(w.k_block, {k.at(key, 0), k.stride}, std::min(kBlockKeys, keys - key), p_.width, ahead);
    multiply_queries<R>(w.tile.s + key * R, w.q, w.k_block, padded(p_.width) / kStep);
  }
  const Index size = Index(keys) * R, vectors = (size + kStep - 1) / kStep;
  w.tile.number_of_spans = 1;
  w.tile.spans[0] = {0, int(vectors), 0, 1};
  if (p_.softcap > 0) {
    const Softcap<T, kStep> cap(w.tile, p_);
    each_vector<T, kStep>(w.tile, [&](Index n, int) { store(w.tile.s + n, cap(load(w.tile.s + n), n)); });
  } else if (p_.adds()) {
    each_vector<T, kStep>(w.tile,
                          [&](Index n, int) { store(w.tile.s + n, load(w.tile.s + n) + load(w.tile.bias + n)); });
  }
  if (w.tile.cover == Cover::some)
    each_vector<T, kStep>(w.tile, [&](Index n, int) {
      store(w.tile.s + n, load_lanes<T>(w.tile.visible + n) ? load(w.tile.s + n) : splat(-kInfinity<T>));
    });
  std::fill(w.tile.s + size, w.tile.s + vectors * kStep, -kInfinity<T>);
}

// m' = max(m, s), alpha = 2^(m - m'), s := p = 2^(s - m'), l := alpha l + sum p
template <class E>
template <int R>
void AttentionDecode<E>::update_softmax(Scratch& w, Sums& sums) const {
  Vec<T> top = sums.m, sum{};
  each_vector<T, kStep>(w.tile, [&](Index n, int) { top = max(load(w.tile.s + n), top); });
  for (int n = R; n < kStep; n *= 2) top = max(rotate<T>(top, n), top);
  const Vec<T> base = top == splat(-kInfinity<T>) ? Vec<T>{} : top;  // nothing visible yet
  const Vec<T> alpha = rescale<T>(sums.m, base);
  each_vector<T, kStep>(w.tile, [&](Index n, int) {
    const Vec<T> p = exp2<T>(load(w.tile.s + n) - base);
    store(w.tile.s + n, p);
    sum += p;
  });
  store(w.alpha, alpha);
  sums.m = top, sums.l = fma(alpha, sums.l, sum);
}

// o := alpha o + p v, to the bit as add_values has it, without touching the values that a row does not see.
template <class E>
template <int R>
void AttentionDecode<E>::add_visible_values(const Scratch& w, int rows, const StoredRows<E>& v, int keys) const {
  const Index width = padded(p_.value_width);
  for (int r = 0; r < rows; ++r)
    for (Index n = 0; n < width; ++n) {
      T sum = 0, &o = w.o[r * width + n];
      for (int k = 0; k < keys; ++k)
        if (w.tile.visible[k * R + r]) sum = fma(w.tile.s[k * R + r], T(*v.at(k, column_at(n))), sum);
      o = fma(w.alpha[r], o, sum);
    }
}

// Values as rows of whole vectors: the tensor's own, or a copy padded with zeros.
template <class E>
StoredRows<E> AttentionDecode<E>::whole_rows(E* copy, const StoredRows<E>& v, int keys) const {
  const Index width = p_.value_width;
  if (!copy) return v;
  for (int k = 0; k < keys; ++k) {
    std::copy_n(v.at(k, 0), width, copy + k * padded(width));
    std::fill(copy + k * padded(width) + width, copy + (k + 1) * padded(width), E{});
  }
  return {copy, padded(width)};
}

template <class E>
template <int R>
void AttentionDecode<E>::run_tile(Scratch& w, Sums& sums, const Rows& rows, Index key, int keys) const {
  visited_tiles.fetch_add(1, std::memory_order_relaxed);
  if (w.tile.cover == Cover::some) fill_visible<R>(w, rows, key, keys);
  w.tile.added = {};
  if (p_.adds()) {
    fill_bias<R>(w, rows, key, keys);
    w.tile.added = {w.tile.bias, kStep};
    hide_infinite_bias<T, R>(w.tile, keys);
  }
  if (p_.dropout.on()) fill_kept<R>(w, rows, key);
  const Site<T>& site = rows[0].site;
  const Index hk = site.h / p_.group();
  const StoredRows<E> k{k_.at(site.b, hk) + key * k_.row_stride, k_.row_stride};
  const StoredRows<E> v{v_.at(site.b, hk) + key * v_.row_stride, v_.row_stride};
  compute_scores<R>(w, k, keys);
  update_softmax<R>(w, sums);
  if (p_.dropout.on())
    each_vector<T, kStep>(
        w.tile, [&](Index n, int) { store(w.tile.s + n, load_lanes<T>(w.keep + n) ? load(w.tile.s + n) : Vec<T>{}); });
  const StoredRows<E> values = whole_rows(w.v, v, keys);
  if (w.tile.cover == Cover::all || all_finite<T>(values.data, values.stride, keys, padded(p_.value_width)))
    add_values<R>(w.o, w.alpha, w.tile.s, values, keys, padded(p_.value_width),
                  RowsAhead(StoredRows<E>{v.at(kTileKeys, 0), v.stride}, padded(p_.value_width)));
  else
    add_visible_values<R>(w, int(rows.size()), values, keys);
}

// Merges the chunks of a head's rows.
template <class E>
void AttentionDecode<E>::finish(Index task) const {
  const Index h = task % p_.heads, b = task / p_.heads;
  const Index first = (b * p_.key_heads + h / p_.group()) * chunks_, row = h % p_.group() * p_.queries;
  const T sink = Site<T>(p_, b, h).sink();
  T* out = result_.out.at(b, h);
  for (Index i = 0; i < p_.queries; ++i, out += result_.out.row_stride)
    result_.lse[task * p_.queries + i] = finish_row(first, row + i, sink, out);
}

// Of the chunks from `first` on. Returns lse.
template <class E>
typename AttentionDecode<E>::T AttentionDecode<E>::finish_row(Index first, Index row, T sink, T* out) const {
  T m = sink;
  for (Index c = 0; c < chunks_; ++c) m = part(first + c, row)[0] > m ? part(first + c, row)[0] : m;
  const T base = m == -kInfinity<T> ? 0 : m;
  const auto factor = [&](T from) { return from == base ? T(1) : std::exp2(from - base); };
  T l = sink == -kInfinity<T> ? 0 : factor(sink);
  std::fill_n(out, p_.value_width, T(0));
  for (Index c = 0; c < chunks_; ++c) {
    const T* from = part(first + c, row);
    const T alpha = factor(from[0]);
    l += alpha * from[1];
    for (Index d = 0; d < p_.value_width; ++d) out[d] += alpha * from[2 + d];
  }
  const T inverse = l == 0 ? 0 : T(p_.dropout.scale) / l;
  for (Index d = 0; d < p_.value_width; ++d) out[d] *= inverse;
  return l == 0 ? -kInfinity<T> : (m + std::log2(l)) * kLn2<T>;
}

}  // namespace attention_ops
