// From tensors to what kernels take: types, views, masks. A type that a processor cannot compute in well is widened.
#pragma once
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "cpu/parallel.h"
#include "kernels/cpu/pairs.h"
#include "kernels/cpu/problem.h"
#include "kernels/cpu/tangents.h"
#include "ops/allocate.h"
#include "ops/views.h"

namespace attention_ops {

constexpr Index kLeastPairs = 1024;  // queries times keys

// Beside keys or values, not only a bias: tiles of pairs and decoding have no products with them.
inline bool has_rows_by_distance(const Attention& a) {
  return a.distance && a.distance->size(3) > 1;
}

// Calls f<T, E>() with the types that sums and rows of attention have. Rows of bfloat16 stay as they are where that is
// fast, but for small problems: padding to the units of products would be most of the work. Some rows of `queries` have
// the types, and so the bits, of all.
template <class F>
auto in_row_types(const Attention& a, Index queries, F&& f) {
  if constexpr (kFastPairs)
    if (!has_rows_by_distance(a) && a.query.scalar_type() == at::kBFloat16 && queries * a.key.size(2) >= kLeastPairs)
      return f.template operator()<float, BFloat16>();
  return in_compute_type(a.query, [&]<class T>() { return f.template operator()<T, T>(); });
}
template <class F>
auto in_row_types(const Attention& a, F&& f) {
  return in_row_types(a, a.query.size(2), f);
}

inline Tensor on_large_pages(Tensor x) {
  want_large_pages(x.mutable_data_ptr(), x.nbytes());
  return x;
}

// As the layers above lay it out, in elements of T.
template <class T>
Tensor empty_rows(const Tensor& like, at::IntArrayRef sizes) {
  return on_large_pages(empty_heads(like.options().dtype(kScalarType<T>), sizes[0], sizes[1], sizes[2], sizes[3]));
}

// Rows [B, H, L, width] for the time of one call, each head's next to each other. The memory of each place is kept for
// the next call, up to where large pages make new memory cheap; who finds a place taken gets new memory.
enum class Place { query, key, value, grad_out };

inline Tensor scratch_rows(const Tensor& like, Place place) {
  static KeptBlock<kLargePages> kept[4];
  KeptBlock<kLargePages>& of = kept[size_t(place)];
  Block* block = of.take(like.numel() * like.element_size());
  return at::from_blob(block->data(), like.sizes(), [&of, block](void*) { of.give(block); }, like.options());
}

// Not by torch, whose threads a forked child would wait for.
template <class T>
Tensor copy_of_rows(const Tensor& x, Place place) {
  const Tensor copy = scratch_rows(x, place);
  const Index heads = x.size(1), length = x.size(2), width = x.size(3), blocks = (length + kTileKeys - 1) / kTileKeys;
  const T* from = static_cast<const T*>(x.const_data_ptr());
  T* to = static_cast<T*>(copy.mutable_data_ptr());
  run_tasks(x.size(0) * heads * blocks, double(x.numel()), 0, [&](Index task, Arena&) {
    const Index block = task % blocks, head = task / blocks, last = std::min((block + 1) * kTileKeys, length);
    const T* rows = from + head / heads * x.stride(0) + head % heads * x.stride(1);
    for (Index r = block * kTileKeys; r < last; ++r)
      std::copy_n(rows + r * x.stride(2), width, to + (head * length + r) * width);
  });
  return copy;
}

// A four-dimensional tensor as rows of T.
template <class T>
class Operand {
 public:
  explicit Operand(const Tensor& x) : tensor_(in_type(x, kScalarType<T>)) {
    if (tensor_.size(3) > 1 && tensor_.stride(3) != 1) tensor_ = tensor_.contiguous();
  }
  // With a null pointer where there is no tensor.
  explicit Operand(Opt x) {
    if (x) *this = Operand(*x);
  }
  // Rows that so many others are multiplied with. A multiple of 1 KiB apart they have few places in the first cache,
  // and from a page on each waits for its address to be translated: a copy is then worth its time.
  static Operand packed(const Tensor& x, Index readers, Place place) {
    constexpr Index kFewPlaces = 1024, kPage = 4096;
    const Index apart = x.stride(2) * Index(sizeof(T)), least = apart < kPage ? 1024 : 512;
    if (x.stride(2) <= x.size(3) || apart % kFewPlaces != 0 || readers < least) return Operand(x);
    const bool is_plain = x.scalar_type() == kScalarType<T> && x.stride(3) == 1;
    return Operand(is_plain ? copy_of_rows<T>(x, place) : in_type(x, kScalarType<T>).contiguous());
  }
  // Readable in whole units of rows and columns, with zeros past its own.
  static Operand padded(const Tensor& x) {
    const Index rows = round_up(x.size(2), kRowUnit<T>), columns = round_up(x.size(3), kDepthUnit<T>);
    if (rows == x.size(2) && columns == x.size(3)) return Operand(x);
    const Tensor whole = at::zeros({x.size(0), x.size(1), rows, columns}, x.options());
    whole.narrow(2, 0, x.size(2)).narrow(3, 0, x.size(3)).copy_(x);
    return Operand(whole);
  }
  Matrices<const T> view() const {
    if (!tensor_.defined()) return {};
    return {static_cast<const T*>(tensor_.const_data_ptr()), tensor_.stride(0), tensor_.stride(1), tensor_.stride(2)};
  }

 private:
  Tensor tensor_;
};

template <class T>
Matrices<T> result_view(const Tensor& x) {
  if (!x.defined()) return {};
  return {static_cast<T*>(x.mutable_data_ptr()), x.stride(0), x.stride(1), x.stride(2)};
}

// Rows by distance, for every batch and head.
template <class T>
class DistanceRows {
 public:
  DistanceRows(Opt x, Index key_width) {
    if (!x) return;
    const Index width = x->size(3);
    tensor_ = in_type(*x, kScalarType<T>);
    if (width > 1 && tensor_.stride(3) != 1) tensor_ = tensor_.contiguous();
    const auto stride = [](Index size, Index of) { return size == 1 ? 0 : of; };
    const Index batches = tensor_.size(0), heads = tensor_.size(1);
    view_.rows = {tensor_.const_data_ptr<T>(), stride(batches, tensor_.stride(0)), stride(heads, tensor_.stride(1)),
                  tensor_.stride(2)};
    view_.has_keys = width > 1, view_.has_values = width > 1 + key_width;
    for (Index n = 0; width > 1 && n < batches * heads; ++n)
      facts_.push_back(
          facts_of_rows(view_.rows.at(n / heads, n % heads) + 1, tensor_.size(2), tensor_.stride(2), width - 1));
    view_.facts = facts_.data();
    view_.facts_batch_stride = stride(batches, heads), view_.facts_head_stride = stride(heads, 1);
  }
  const DistanceTable<T>& view() const { return view_; }

 private:
  Tensor tensor_;
  std::vector<TableFacts> facts_;
  DistanceTable<T> view_;
};

// As a backward pass reads them, for every tile of keys.
template <class E>
Operand<E> queries_of(const Tensor& x, const Attention& a, Place place) {
  return kPaired<E> ? Operand<E>(x) : Operand<E>::packed(x, a.key.size(2), place);
}

// The problem of one call, with the tensors that it points into. Keys and values are rows of E, queries of Q.
template <class T, class E = T, class Q = T>
class Loaded {
 public:
  explicit Loaded(const Attention& a, bool is_backward = false)
      : query_(is_backward ? queries_of<Q>(a.query, a, Place::query) : Operand<Q>(a.query)),
        key_(keys_of(a.key, a, Place::key)),
        value_(keys_of(a.value, a, Place::value)),
        distance_(a.distance, a.query.size(3)),
        sinks_(a.sinks),
        seed_(a.seed),
        mask_(a) {
    problem.batch = a.query.size(0), problem.heads = a.query.size(1), problem.queries = a.query.size(2);
    problem.width = a.query.size(3), problem.key_heads = a.key.size(1), problem.keys = a.key.size(2);
    problem.value_width = a.value.size(3);
    problem.q = query_.view();
    if constexpr (std::is_same_v<Q, E>) problem.k = key(), problem.v = value();
    if (a.bias) problem.bias = read_view(*a.bias);
    problem.distance = distance_.view();
    problem.sinks = sinks_.data();
    problem.mask = mask_.view(problem.queries, problem.keys);
    problem.scale = T(a.scale), problem.softcap = T(a.softcap);
    if (a.dropout_p > 0) problem.dropout = {a.dropout_p, seed_.data(), a.seed->dim() == 2};
  }
  Loaded(const Loaded&) = delete;

  // The mask sees other rows and heads than their order here.
  void place(Opt heads, Opt rows, Index queries) {
    heads_ = Vector<int64_t>(heads), rows_ = Vector<int64_t>(rows);
    problem.true_heads = heads_.data(), problem.true_rows = rows_.data();
    problem.mask = mask_.view(queries, problem.keys);
  }

  // Padded where products of pairs read them.
  static Operand<E> keys_of(const Tensor& x, const Attention& a, Place place) {
    return kPaired<Q>
               ? Operand<E>::padded(x)
               : Operand<E>::packed(x, a.query.size(2) * a.query.size(1) / std::max<Index>(a.key.size(1), 1), place);
  }

  Matrices<const E> key() const { return key_.view(); }
  Matrices<const E> value() const { return value_.view(); }

  Problem<T, Q> problem;

 private:
  Operand<Q> query_;
  Operand<E> key_, value_;
  DistanceRows<T> distance_;
  Vector<T> sinks_;
  Vector<int64_t> seed_, heads_{std::nullopt}, rows_{std::nullopt};
  MaskArguments mask_;
};

// The tangents of one call's inputs.
template <class T>
class LoadedTangents {
 public:
  LoadedTangents(Opt query, Opt key, Opt value, Opt bias, Opt distance, Opt sinks, Opt lse = std::nullopt)
      : query_(query), key_(key), value_(value), distance_(distance, 0), sinks_(sinks), lse_(lse) {
    view = {query_.view(),    key_.view(),   value_.view(), bias ? read_view(*bias) : Tensor4{},
            distance_.view(), sinks_.data(), lse_.data()};
  }
  LoadedTangents(const LoadedTangents&) = delete;

  Tangents<T> view;

 private:
  Operand<T> query_, key_, value_;
  DistanceRows<T> distance_;
  Vector<T> sinks_, lse_;
};

}  // namespace attention_ops
