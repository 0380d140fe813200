// Scores of a tile in log2 units, s[key][query]: product, softcap, bias, mask. Every pass computes them here.
#pragma once
#include "kernels/cpu/distance.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/problem.h"
#include "kernels/cpu/rows.h"

namespace attention_ops {

// The part of a tile that work is done on: some keys, and the vectors of queries that see any of them.
struct Span {
  int key, keys, vector, vectors;
};

constexpr int kSpanKeys = 16;  // the finest step of a span

// How far the tile that comes next, as a rule, is from this one.
struct Ahead {
  Index rows = 0, keys = kTileKeys;
};

// What is added to the products: of key k in lanes, `stride` from those of key k - 1. Null: nothing.
template <class T>
struct Added {
  const T* data = nullptr;
  Index stride = 0;

  explicit operator bool() const { return data; }
  Vec<T> at(Index key, Index lane) const { return load(data + key * stride + lane); }
};

// Buffers of a tile, [kTileKeys, panel width] each, and what is known of it.
template <class T>
struct ScoreTile {
  T* s = nullptr;
  T* bias = nullptr;         // where the problem has one, or one by distance
  T* by_distance = nullptr;  // [kTileKeys + panel width]: those of a tile, the farthest key of the first query last
  Added<T> added;
  T* relative = nullptr;  // q a', where the problem has such rows
  Skew<T> skew;
  T* tanh = nullptr;              // of products / softcap, for derivatives; 0 where masked
  LaneInt<T>* visible = nullptr;  // valid within the spans where the tile's cover is `some`
  LaneInt<T>* spare = nullptr;
  Ahead ahead;
  RowsToAsk next_bias;  // of the tile ahead; a row with each key's products: all at once hold up what is read now
  Cover cover = Cover::none;
  int number_of_spans = 0;
  Span spans[kTileKeys / kSpanKeys];

  template <class E>
  void take(Pieces& pieces, const Problem<T, E>& p, int width, bool derivatives) {
    const Index size = Index(kTileKeys) * width;
    const int operands = p.mask.spec->depth();
    pieces(s, size);
    if (operands > 0 || p.adds()) pieces(visible, size);
    if (operands > 1) pieces(spare, size * (operands - 1));
    if (p.adds()) pieces(bias, size);
    if (p.distance.defined()) pieces(by_distance, kTileKeys + width);
    if (p.distance.has_keys) pieces(relative, size);
    if (p.distance.has_keys || p.distance.has_values) skew.take(pieces);
    if (derivatives && p.softcap > 0) pieces(tanh, size);
  }
};

// Calls f(vectors, span) for each span, the number of vectors a constant.
template <class T, class F>
void each_span(const ScoreTile<T>& tile, F&& f) {
  for (int n = 0; n < tile.number_of_spans; ++n)
    with_count<kRegisterVectors>(tile.spans[n].vectors, [&](auto vectors) { f(vectors, tile.spans[n]); });
}

// Calls f(offset of the element, lane) for each vector of a span, or of every span. The span is a copy, which no store
// in f can change.
template <class T, int Width, class F>
inline __attribute__((always_inline)) void each_vector(const Span span, F&& f) {
  for (int k = span.key; k < span.key + span.keys; ++k)
    for (int v = span.vector; v < span.vector + span.vectors; ++v) f(Index(k) * Width + v * kLanes<T>, v * kLanes<T>);
}
template <class T, int Width, class F>
inline __attribute__((always_inline)) void each_vector(const ScoreTile<T>& tile, F&& f) {
  for (int n = 0; n < tile.number_of_spans; ++n) each_vector<T, Width>(tile.spans[n], f);
}

// To log2 units. Finite numbers stay finite, so that minus infinity alone means masked: those within a third of the
// range's ends become the ends.
template <class T>
inline __attribute__((always_inline)) Vec<T> scaled_bias(Vec<T> x) {
  constexpr T most = std::numeric_limits<T>::max();
  const Ints<T> finite = (x >= splat(-most)) & (x <= splat(most));
  return finite ? clamped<T>(x * splat(kLog2e<T>), most) : x;
}

// out[key][query] = map(x) of one batch and head, for the `rows` queries of a panel.
template <class T, int Width, class Map>
void load_block(T* out, const Tensor4& x, Index b, Index h, Index row, int rows, Index key, int keys, Map&& map) {
  with_element(x.element, [&]<class B>(B*) {
    const B* data =
        static_cast<const B*>(x.data) + b * x.strides[0] + h * x.strides[1] + row * x.strides[2] + key * x.strides[3];
    transpose_to_lanes(out, Width, Width, keys, [&](int q, Index k, int n) {
      const B* from = data + std::min(q, rows - 1) * x.strides[2] + k * x.strides[3];
      return map(read_elements<T>(from, x.strides[3], n));
    });
  });
}

// A bias of minus infinity hides its place.
template <class T, int Width>
void hide_infinite_bias(ScoreTile<T>& tile, int keys) {
  Ints<T> infinite{};
  for (Index n = 0; n < Index(keys) * Width; n += kLanes<T>) infinite |= load(tile.bias + n) == splat(-kInfinity<T>);
  if (!any(infinite)) return;
  if (tile.cover == Cover::all) std::fill_n(tile.visible, Index(keys) * Width, LaneInt<T>(-1));
  tile.cover = Cover::some;
  for (Index n = 0; n < Index(keys) * Width; n += kLanes<T>)
    store_lanes<T>(tile.visible + n, load_lanes<T>(tile.visible + n) & ~(load(tile.bias + n) == splat(-kInfinity<T>)));
}

// out[lane - key + keys - 1] = map(row[0]) of the pairs of a tile.
template <class T, class E, class Map>
void load_by_distance(T* out, const DistanceTable<T>& table, const Site<T, E>& site, const Panel<T, E>& panel,
                      Index key, int keys, Map&& map) {
  constexpr int kWidth = Panel<T, E>::kWidth;
  const Problem<T, E>& p = site.of;
  const Index size = keys + kWidth - 1;
  const T* last = table.row(site.b, site.h, key + keys - 1 - panel.first + p.queries - 1);
  const Index real = std::min<Index>(size, keys + panel.count - 1);  // lanes past the last query repeat its entry
  for (Index n = 0; n < size; ++n) out[n] = last[-std::min(n, real - 1) * table.rows.row_stride];
  for (Index n = 0; n < size; n += kLanes<T>) store(out + n, map(load(out + n)));
}

// The sum of two biases: finite ones stay finite, and either one's minus infinity hides the place.
template <class T>
Vec<T> sum_of_biases(Vec<T> a, Vec<T> b) {
  constexpr T most = std::numeric_limits<T>::max();
  const Vec<T> hidden = splat(-kInfinity<T>), limit = splat(most), sum = a + b;
  const Ints<T> finite = (a >= -limit) & (a <= limit) & (b >= -limit) & (b <= limit);
  const Vec<T> visible = finite ? clamped<T>(sum, most) : sum;
  return (a == hidden) | (b == hidden) ? hidden : visible;
}

// A tile's part of the dense bias. Returns whether its numbers are finite, as those of most tiles are, and none so high
// that it is not in log2 units.
template <class T, class E>
bool load_bias(ScoreTile<T>& tile, const Site<T, E>& site, const Panel<T, E>& panel, Index key, int keys) {
  constexpr int kWidth = Panel<T, E>::kWidth;
  const Tensor4& bias = site.of.bias;
  tile.next_bias =
      part_of(bias, site.b, site.h, panel.first + tile.ahead.rows, kWidth, key + tile.ahead.keys, kTileKeys);
  const auto load_with = [&](auto&& map) {
    load_block<T, kWidth>(tile.bias, bias, site.b, site.h, panel.first, panel.count, key, keys, map);
  };
  Ints<T> lost{};
  load_with([&](Vec<T> x) {
    const Vec<T> scaled = max(splat(std::numeric_limits<T>::lowest()), x * splat(kLog2e<T>));
    lost |= not_finite(x - scaled);
    return scaled;
  });
  if (!any(lost)) return true;
  load_with([](Vec<T> x) { return scaled_bias<T>(x); });
  return false;
}

// What is added to the tile's products: a dense bias, one by distance, which is read as it lies, or their sum.
template <class T, class E>
void find_added(ScoreTile<T>& tile, const Site<T, E>& site, const Panel<T, E>& panel, Index key, int keys) {
  constexpr int kWidth = Panel<T, E>::kWidth;
  const Problem<T, E>& p = site.of;
  tile.added = {};
  if (tile.cover == Cover::none || !p.adds()) return;
  const T* nearest = tile.by_distance + keys - 1;  // of key 0
  if (p.distance.defined())
    load_by_distance(tile.by_distance, p.distance, site, panel, key, keys, [](Vec<T> x) { return scaled_bias<T>(x); });
  const auto hides = [](T x) { return x == -kInfinity<T>; };
  if (!p.bias.defined() && std::none_of(tile.by_distance, tile.by_distance + keys + kWidth - 1, hides)) {
    tile.added = {nearest, -1};
    return;
  }
  const bool is_finite = p.bias.defined() && load_bias(tile, site, panel, key, keys);
  for (Index n = 0; p.distance.defined() && n < Index(keys) * kWidth; n += kLanes<T>) {
    const Vec<T> x = load(nearest - n / kWidth + n % kWidth);
    store(tile.bias + n, p.bias.defined() ? sum_of_biases<T>(load(tile.bias + n), x) : x);
  }
  if (!is_finite || p.distance.defined()) hide_infinite_bias<T, kWidth>(tile, keys);
  tile.added = {tile.bias, kWidth};
}

// Calls f(offset of its first element, first lane, block, rows of `table` from column c on) for each vector of a span.
template <class T, class E, class F>
void each_skew_block(const Span& span, const DistanceTable<T>& table, Index c, const Site<T, E>& site,
                     const Panel<T, E>& panel, Index key, F&& f) {
  constexpr int kStep = kLanes<T>;
  const TableFacts& facts = table.facts_of(site.b, site.h);
  const int rows = span.keys + kStep - 1;
  for (int lane = span.vector * kStep; lane < (span.vector + span.vectors) * kStep; lane += kStep) {
    const Index first = key + span.key - (panel.first + lane + kStep - 1) + site.of.queries - 1;
    const bool is_constant = first + rows <= facts.head || first >= facts.tail;
    const SkewBlock block{first, span.keys, std::min(kStep, panel.count - lane), rows, is_constant, facts.is_finite};
    f(Index(span.key) * Panel<T, E>::kWidth + lane, lane, block,
      PaddedRows<T>{table.row(site.b, site.h, first + block.skipped()) + c, table.rows.row_stride});
  }
}

// out (+)= x rows', for panels x [width, panel width] and the rows of `table` from column c on.
template <bool Add, class T, class E>
void multiply_by_distance(T* out, const ScoreTile<T>& tile, const Span& span, const DistanceTable<T>& table, Index c,
                          const T* x, Index width, const Site<T, E>& site, const Panel<T, E>& panel, Index key) {
  each_skew_block(span, table, c, site, panel, key,
                  [&](Index n, int lane, const SkewBlock& block, const PaddedRows<T>& rows) {
                    tile.skew.template multiply<Add>(out + n, Panel<T, E>::kWidth, rows, x + lane, Panel<T, E>::kWidth,
                                                     width, block);
                  });
}

// out[column][query] += sum_k rows[column] a[k][query], for the rows of `table` from column c on.
template <class T, class E>
void add_to_queries_by_distance(T* out, const T* a, const ScoreTile<T>& tile, const Span& span,
                                const DistanceTable<T>& table, Index c, Index width, const Site<T, E>& site,
                                const Panel<T, E>& panel, Index key) {
  constexpr int kWidth = Panel<T, E>::kWidth;
  each_skew_block(span, table, c, site, panel, key,
                  [&](Index n, int lane, const SkewBlock& block, const PaddedRows<T>& rows) {
                    if (block.is_constant)
                      return tile.skew.add_constant_to_queries(out + lane, kWidth, rows, a + n, kWidth, width, block);
                    tile.skew.spread(a + n, kWidth, block);
                    tile.skew.add_to_queries(out + lane, kWidth, rows, width, block);
                  });
}

// Which vectors of queries see any of some keys, as the first and the number; all if every lane sees all.
template <class T>
struct LiveVectors {
  int first, count;
  bool all;
};

template <class T, int Width>
LiveVectors<T> live_vectors(const LaneInt<T>* visible, int keys, int vectors) {
  LiveVectors<T> live{vectors, 0, true};
  int last = -1;
  for (int v = 0; v < vectors; ++v) {
    Ints<T> some{}, every = ~Ints<T>{};
    for (int k = 0; k < keys; ++k) {
      const Ints<T> lanes = load_lanes<T>(visible + k * Width + v * kLanes<T>);
      some |= lanes, every &= lanes;
    }
    live.all = live.all && !any(~every);
    if (any(some)) live.first = std::min(live.first, v), last = v;
  }
  live.count = std::max(last - live.first + 1, 0);
  return live;
}

// Cuts a partly visible tile into spans.
template <class T, int Width>
void find_spans(ScoreTile<T>& tile, int keys, int vectors) {
  tile.number_of_spans = 0;
  bool all = true;
  for (int key = 0; key < keys; key += kSpanKeys) {
    const int count = std::min(kSpanKeys, keys - key);
    const auto live = live_vectors<T, Width>(tile.visible + Index(key) * Width, count, vectors);
    all = all && live.all;
    if (live.count == 0) continue;
    Span* last = tile.number_of_spans ? &tile.spans[tile.number_of_spans - 1] : nullptr;
    if (last && last->key + last->keys == key && last->vector == live.first && last->vectors == live.count)
      last->keys += count;
    else
      tile.spans[tile.number_of_spans++] = {key, count, live.first, live.count};
  }
  tile.cover = tile.number_of_spans == 0 ? Cover::none : all ? Cover::all : Cover::some;
}

template <class T, class E>
void find_cover(ScoreTile<T>& tile, const Site<T, E>& site, const Panel<T, E>& panel, Index key, int keys) {
  constexpr int kWidth = Panel<T, E>::kWidth;
  const Tile shape = panel.tile(key, keys);
  tile.cover = site.mask.cover(shape);
  if (tile.cover == Cover::some)
    site.mask.template fill<kWidth>(shape, tile.visible, tile.spare, Index(kTileKeys) * kWidth);
  find_added(tile, site, panel, key, keys);
  tile.number_of_spans = 1;
  tile.spans[0] = {0, keys, 0, panel.vectors()};
  if (tile.cover == Cover::some) find_spans<T, kWidth>(tile, keys, panel.vectors());
  if constexpr (std::is_same_v<T, E>)
    for (int n = 0; tile.relative && tile.cover != Cover::none && n < tile.number_of_spans; ++n)
      multiply_by_distance<false>(tile.relative, tile, tile.spans[n], site.of.distance, 1, panel.q_t, site.of.width,
                                  site, panel, key);
}

// The softcap of products, the bias added to it. Copies, which no store can change.
template <class T, int Width>
struct Softcap {
  template <class E>
  Softcap(const ScoreTile<T>& tile, const Problem<T, E>& p)
      : unit(splat(p.softcap * kLog2e<T>)),
        tanh_to(tile.tanh),
        visible(tile.cover == Cover::some ? tile.visible : nullptr),
        added(tile.added) {}

  Vec<T> operator()(Vec<T> x, Index n) const {
    const Vec<T> t = tanh(x);
    if (tanh_to) store(tanh_to + n, !visible ? t : load_lanes<T>(visible + n) ? t : Vec<T>{});
    return added ? fma(t, unit, added.at(n / Width, n % Width)) : t * unit;
  }

  Vec<T> unit;
  T* tanh_to;
  const LaneInt<T>* visible;
  Added<T> added;
};

// Calls use(sum, offset, v) with each vector of query_factor() q (k + a)' + bias of one span, while it is in a
// register. With a softcap the bias comes later.
template <class T, int NV, class F>
inline __attribute__((always_inline)) void span_products(const ScoreTile<T>& tile, const Site<T>& site,
                                                         const Panel<T>& panel, Index key, const Span& span, F&& use) {
  constexpr int kWidth = Panel<T>::kWidth, kStep = kLanes<T>;
  const Problem<T>& p = site.of;
  const int lane = span.vector * kStep;
  const bool adds = tile.added && p.softcap == 0;
  const T* k = site.k + key * p.k.row_stride;
  each_row_tile<kTileRows<NV>>(span.keys, [&](auto rows, Index r) {
    const Index first = span.key + r;
    if (tile.added)
      for (int i = 0; i < rows; ++i) tile.next_bias.ask(first + i);
    Accumulators<T, rows, NV> acc{};  // not the bias: a far one would round every term of the sum
    multiply_rows<T, rows, NV>(acc, k + first * p.k.row_stride, p.k.row_stride, panel.q_t + lane, kWidth, p.width);
    each<T, rows, NV>(acc, [&](Vec<T>& x, int i, int v) {
      const Index n = (first + i) * kWidth + lane + v * kStep;
      if (tile.relative) x += load(tile.relative + n);
      use(adds ? x + tile.added.at(first + i, lane + v * kStep) : x, n, v);
    });
  });
}

// The same for rows of pairs, which are not multiplied by the factor before; the sums go through tile.s.
template <class T, int NV, class F>
inline __attribute__((always_inline)) void span_products(const ScoreTile<T>& tile, const Site<T, BFloat16>& site,
                                                         const Panel<T, BFloat16>& panel, Index key, const Span& span,
                                                         F&& use) {
  constexpr int kWidth = Panel<T, BFloat16>::kWidth, kStep = kLanes<T>;
  const auto& p = site.of;
  const int lane = span.vector * kStep, first = span.key * kWidth + lane;
  const bool adds = tile.added && p.softcap == 0;
  const Vec<T> factor = splat(p.query_factor());
  multiply_pairs<false>(tile.s + first, kWidth, {site.k + (key + span.key) * p.k.row_stride, p.k.row_stride},
                        {panel.q_t + 2 * lane, 2 * kWidth}, span.keys, NV, p.width);
  for (Index n = first; n < first + span.keys * kWidth; n += kWidth) {
    if (tile.added) tile.next_bias.ask(n / kWidth);
    for (int v = 0; v < NV * kStep; v += kStep) {
      const Vec<T> x = factor * load(tile.s + n + v);
      use(adds ? x + tile.added.at(n / kWidth, n % kWidth + v) : x, n + v, v / kStep);
    }
  }
}

// The scores of one span of a tile whose cover is known.
template <class T, int NV, class E>
void span_scores(const ScoreTile<T>& tile, const Site<T, E>& site, const Panel<T, E>& panel, Index key,
                 const Span& span) {
  constexpr int kWidth = Panel<T, E>::kWidth;
  const bool has_cap = site.of.softcap > 0;
  const Softcap<T, kWidth> cap(tile, site.of);
  span_products<T, NV>(tile, site, panel, key, span,
                       [&](Vec<T> x, Index n, int) { store(tile.s + n, has_cap ? cap(x, n) : x); });
  if (tile.cover == Cover::some)
    each_vector<T, kWidth>(span, [&](Index n, int) {
      store(tile.s + n, load_lanes<T>(tile.visible + n) ? load(tile.s + n) : splat(-kInfinity<T>));
    });
}

// s := p = 2^exponent(score, offset, v) for one span, 0 where masked, in one pass; calls use(p, v) on the way.
template <class T, int NV, class E, class Exponent, class Use>
inline __attribute__((always_inline)) void span_weights(const ScoreTile<T>& tile, const Site<T, E>& site,
                                                        const Panel<T, E>& panel, Index key, const Span& span,
                                                        Exponent&& exponent, Use&& use) {
  constexpr int kWidth = Panel<T, E>::kWidth;
  T* const s = tile.s;
  const LaneInt<T>* visible = tile.cover == Cover::some ? tile.visible : nullptr;
  const auto weigh = [&](Vec<T> score, Index n, int v) {
    Vec<T> x = exponent(score, n, v);
    if (visible) x = load_lanes<T>(visible + n) ? x : splat(-kInfinity<T>);
    const Vec<T> p = exp2<T, E>(x);
    store(s + n, p);
    use(p, v);
  };
  if (site.of.softcap == 0) return span_products<T, NV>(tile, site, panel, key, span, weigh);
  const Softcap<T, kWidth> cap(tile, site.of);
  span_products<T, NV>(tile, site, panel, key, span, [&](Vec<T> x, Index n, int v) { weigh(cap(x, n), n, v); });
}

// Fills the tile; its cover is `none`, and nothing is computed, where it has no visible element.
template <class T, class E>
Cover compute_scores(ScoreTile<T>& tile, const Site<T, E>& site, const Panel<T, E>& panel, Index key, int keys) {
  find_cover(tile, site, panel, key, keys);
  if (tile.cover != Cover::none)
    each_span(tile, [&](auto vectors, const Span& span) { span_scores<T, vectors>(tile, site, panel, key, span); });
  return tile.cover;
}

}  // namespace attention_ops
