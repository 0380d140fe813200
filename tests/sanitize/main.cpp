// Drives every CPU kernel of attention over many small problems in exactly fitting memory, and checks the forward pass
// and the weights against their formula. Torch-free: built with the sanitizers by the Makefile beside it, once for each
// instruction set.
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "arrays.h"
#include "kernels/cpu/attention_backward.h"
#include "kernels/cpu/attention_decode.h"
#include "kernels/cpu/attention_jvp.h"
#include "kernels/cpu/attention_softmax.h"
#include "kernels/cpu/attention_weights.h"
#include "problems.h"

namespace attention_ops {
namespace {

template <class F>
void run_all(Index tasks, size_t scratch_bytes, F&& f) {
  Arena arena(scratch_bytes);
  for (Index task = 0; task < tasks; ++task) {
    arena.reset();
    f(task, arena);
  }
}

// One problem with all its operands, results and gradients: rows of E, sums in T.
template <class T, class E = T>
class Trial {
 public:
  Trial(const Shape& shape, const std::string& mask) : s_(shape), spec_(parse_mask(mask)), tensors_(spec_, shape) {
    p_.batch = s_.B, p_.heads = s_.H, p_.key_heads = s_.Hkv, p_.queries = s_.Lq, p_.keys = s_.Lk;
    p_.width = s_.D, p_.value_width = s_.Dv;
    p_.q = rows<const E>(q_.get(), s_.H, s_.Lq, s_.D);
    p_.k = padded(k_, s_.D), p_.v = padded(v_, s_.Dv);
    p_.mask = {&spec_, tensors_.data(), int32_t(s_.Lq), int32_t(s_.Lk)};
    p_.scale = T(0.3);
    if (draw(0, 2) == 0) p_.softcap = T(2);
    if (draw(0, 1)) p_.sinks = sinks_.get();
    if (draw(0, 1)) add_bias();
    if (draw(0, 1)) add_distance();
  }

  bool run() {
    forward();
    bool right = agrees();
    if constexpr (std::is_same_v<T, E>)
      if (is_decode(s_.H, s_.Hkv, s_.Lq) && !p_.distance.has_keys) {
        right &= decode<T>();
        if constexpr (sizeof(T) == 4) right &= decode<Float16>() && decode<BFloat16>();
      }
    if (draw(0, 1)) p_.dropout = {0.3, &seed_, false};
    right &= turns();
    forward();
    backward();
    if constexpr (std::is_same_v<T, E>) {
      second();
      p_.dropout = {}, p_.value_width = 0, p_.distance.has_values = false;
      weights();
      summaries();
    }
    return right;
  }

 private:
  template <class X>
  static Matrices<X> rows(X* data, Index heads, Index length, Index width) {
    return {data, heads * length * width, length * width, width};
  }
  // Keys or values in the units that products read, zero past their own rows and columns.
  Index padded_size(Index width) const {
    return s_.B * s_.Hkv * round_up(s_.Lk, kRowUnit<E>) * round_up(width, kDepthUnit<E>);
  }
  Matrices<const E> padded(const Array<E>& x, Index width) const {
    const Index length = round_up(s_.Lk, kRowUnit<E>), columns = round_up(width, kDepthUnit<E>);
    for (Index i = 0; i < padded_size(width); ++i)
      if (i % columns >= width || i / columns % length >= s_.Lk) x[i] = E{};
    return rows<const E>(x.get(), s_.Hkv, length, columns);
  }
  static Tensor4 tensor4(void* data, const Index (&sizes)[4]) {
    Tensor4 x{data, sizeof(T) == 8 ? Element::float64 : Element::float32, {}, {}};
    Index stride = 1;
    for (int axis = 3; axis >= 0; --axis) {
      x.sizes[axis] = sizes[axis], x.strides[axis] = sizes[axis] == 1 ? 0 : stride;
      stride *= sizes[axis];
    }
    return x;
  }

  // Over some axes it is repeated.
  void add_bias() {
    Index sizes[4] = {s_.B, s_.H, s_.Lq, s_.Lk}, count = 1;
    for (Index& size : sizes) {
      if (draw(0, 3) == 0) size = 1;
      count *= size;
    }
    bias_ = normal<T>(count), grad_bias_ = array_of<T>(count);
    p_.bias = tensor4(bias_.get(), sizes), grad_bias_view_ = tensor4(grad_bias_.get(), sizes);
  }

  // A bias alone, or rows beside keys too, or beside keys and values.
  void add_distance() {
    const Index parts = std::is_same_v<T, E> ? draw(0, 2) : 0, rows = std::max<Index>(s_.Lq + s_.Lk - 1, 0);
    columns_ = 1 + (parts > 0 ? s_.D : 0) + (parts > 1 ? s_.Dv : 0);
    const bool shared = draw(0, 1);
    const Index count = (shared ? 1 : s_.B * s_.H) * rows * columns_;
    distance_ = normal<T>(count), grad_distance_ = array_of<T>(count);
    const Index tables = shared ? 1 : s_.B * s_.H, reach = draw(0, rows);  // beyond it a table is clipped
    for (Index n = 0; n < tables; ++n) {
      T* table = distance_.get() + n * rows * columns_;
      for (Index r = reach; r < rows; ++r)
        std::copy_n(table + reach * columns_ + 1, columns_ - 1, table + r * columns_ + 1);
      facts_.push_back(facts_of_rows(table + 1, rows, columns_, columns_ - 1));
      facts_.back().is_finite = draw(0, 1);
    }
    p_.distance.facts_batch_stride = shared ? 0 : s_.H, p_.distance.facts_head_stride = shared ? 0 : 1;
    p_.distance.rows = {distance_.get(), shared ? 0 : s_.H * rows * columns_, shared ? 0 : rows * columns_, columns_};
    p_.distance.has_keys = parts > 0, p_.distance.has_values = parts > 1, p_.distance.facts = facts_.data();
    grad_distance_view_ = {grad_distance_.get(), shared ? 1 : s_.B, shared ? 1 : s_.H};
  }

  void forward(const RowTurn<T>& turn = {}) {
    const AttentionForward<T, E> kernel(p_, {rows<E>(out_.get(), s_.H, s_.Lq, s_.Dv), lse_.get()}, turn);
    for (Index task = 0; task < kernel.pack_tasks(); ++task) kernel.pack(task);
    run_all(kernel.tasks(), kernel.scratch_bytes(), [&](Index task, Arena& arena) { kernel.run(task, arena); });
  }

  // Whether the decoding kernel agrees too, from keys and values that are rounded to S for good.
  template <class S>
  bool decode() {
    const Array<S> k = rounded<S>(k_, all_keys_ * s_.D), v = rounded<S>(v_, all_keys_ * s_.Dv);
    const AttentionDecode<S> kernel(p_, rows<const S>(k.get(), s_.Hkv, s_.Lk, s_.D),
                                    rows<const S>(v.get(), s_.Hkv, s_.Lk, s_.Dv),
                                    {rows<T>(out_.get(), s_.H, s_.Lq, s_.Dv), lse_.get()});
    run_all(kernel.tasks(), kernel.scratch_bytes(), [&](Index task, Arena& arena) { kernel.run(task, arena); });
    for (Index task = 0; task < kernel.finish_tasks(); ++task) kernel.finish(task);
    return agrees();
  }
  template <class S>
  static Array<S> rounded(const Array<T>& x, Index count) {
    Array<S> result = array_of<S>(count);
    for (Index i = 0; i < count; ++i) result[i] = convert<S>(x[i]), x[i] = T(result[i]);
    return result;
  }

  // The weights without lse, last those of each head.
  void softmax() {
    for (const bool average : {true, false}) {
      const Tensor4 out = tensor4(weights_.get(), {s_.B, average ? 1 : s_.H, s_.Lq, s_.Lk});
      const AttentionSoftmax<T, E> kernel(p_, out, average);
      run_all(kernel.tasks(), kernel.scratch_bytes(), [&](Index task, Arena& arena) { kernel.run(task, arena); });
    }
  }

  void backward(const BackwardTangent<T>* along = nullptr) {
    const ValueGradient<T, E> source(s_.Dv);
    BackwardResult<T, E> result = query_key_bias();
    result.grad_value = rows<E>(grad_v_.get(), s_.Hkv, s_.Lk, s_.Dv);
    if (p_.sinks) result.grad_sinks = grad_sinks_.get();
    backward_from(source,
                  {rows<const E>(out_.get(), s_.H, s_.Lq, s_.Dv), rows<const E>(grad_out_.get(), s_.H, s_.Lq, s_.Dv),
                   lse_.get(), grad_lse_.get()},
                  result, along);
  }

  // Whether rows that kernels turn have the bits of rows turned before, and gradients those of gradients turned after.
  bool turns() {
    if (s_.Lq == 0) return true;
    const Index pairs = draw(0, s_.D / 2), length = std::max(s_.Lq, s_.Lk), row = 2 * pairs;
    const bool shared = draw(0, 1), interleaved = draw(0, 1), inverse = draw(0, 1);
    const Array<T> table = normal<T>((shared ? 1 : s_.B) * length * row);
    const auto last = [&](Index rows) {
      return RowTurn<T>{
          table.get() + (length - rows) * row, shared ? 0 : length * row, row, pairs, interleaved, inverse};
    };
    const RowTurn<T> of_queries = last(s_.Lq), of_keys = last(s_.Lk);
    const auto turned = [&](const RowTurn<T>& turn, const E* from, Index heads, Index rows) {
      std::vector<E> to(s_.B * heads * rows * s_.D);
      for (Index n = 0; n < s_.B * heads * rows; ++n)
        turn(to.data() + n * s_.D, from + n * s_.D, 1, s_.D, n / rows / heads, n % rows);
      return to;
    };
    const auto same = [](const std::vector<E>& a, const E* b) {
      return a.empty() || std::memcmp(a.data(), b, a.size() * sizeof(E)) == 0;
    };
    const Matrices<const E> natural = p_.q;
    const std::vector<E> q = turned(of_queries, natural.data, s_.H, s_.Lq);
    p_.q.data = q.data();
    forward();
    const std::vector<E> out(out_.get(), out_.get() + all_rows_ * s_.Dv);
    p_.q = natural;
    forward(of_queries);
    const ValueGradient<T, E> source(s_.Dv);
    const BackwardInput<T, E> input{rows<const E>(out_.get(), s_.H, s_.Lq, s_.Dv),
                                    rows<const E>(grad_out_.get(), s_.H, s_.Lq, s_.Dv), lse_.get(), grad_lse_.get()};
    BackwardResult<T, E> result;
    result.grad_query = rows<E>(grad_q_.get(), s_.H, s_.Lq, s_.D);
    result.grad_key = rows<E>(grad_k_.get(), s_.Hkv, s_.Lk, s_.D);
    backward_from(source, input, result);
    const std::vector<E> grad_q = turned(of_queries, grad_q_.get(), s_.H, s_.Lq);
    const std::vector<E> grad_k = turned(of_keys, grad_k_.get(), s_.Hkv, s_.Lk);
    result.turn_query = of_queries, result.turn_key = of_keys;
    backward_from(source, input, result);
    return same(out, out_.get()) && same(grad_q, grad_q_.get()) && same(grad_k, grad_k_.get());
  }

  // Tangents of some of the inputs, in the operands' own layouts.
  Tangents<T> tangents() {
    Tangents<T> along;
    if (draw(0, 3)) along.q = rows<const T>(q_dot_.get(), s_.H, s_.Lq, s_.D);
    if (draw(0, 3)) along.k = rows<const T>(k_dot_.get(), s_.Hkv, s_.Lk, s_.D);
    if (draw(0, 3)) along.v = rows<const T>(v_dot_.get(), s_.Hkv, s_.Lk, s_.Dv);
    if (p_.bias.defined() && draw(0, 3)) along.bias = p_.bias, along.bias.data = grad_bias_.get();
    if (p_.distance.defined() && draw(0, 3)) along.distance = p_.distance;
    if (p_.sinks && draw(0, 3)) along.sinks = sinks_.get();
    return along;
  }

  // Forward mode, then the gradients' tangents.
  void second() {
    BackwardTangent<T> along;
    along.of = tangents(), along.of.lse = lse_dot_.get();
    along.out = rows<const T>(out_dot_.get(), s_.H, s_.Lq, s_.Dv);
    if (draw(0, 3)) along.grad_out = rows<const T>(grad_out_.get(), s_.H, s_.Lq, s_.Dv);
    if (draw(0, 1)) along.grad_lse = grad_lse_.get();
    const bool again = draw(0, 1);
    const AttentionJvp<T> kernel(p_, along.of,
                                 {again ? Matrices<const T>{} : rows<const T>(out_.get(), s_.H, s_.Lq, s_.Dv),
                                  again ? rows<T>(out_.get(), s_.H, s_.Lq, s_.Dv) : Matrices<T>{}, lse_.get(),
                                  rows<T>(out_dot_.get(), s_.H, s_.Lq, s_.Dv), lse_dot_.get()});
    run_all(kernel.tasks(), kernel.scratch_bytes(), [&](Index task, Arena& arena) { kernel.run(task, arena); });
    backward(&along);
  }

  void weights() {
    Tangents<T> tangents_of_all = tangents();
    tangents_of_all.lse = lse_dot_.get();
    for (const bool average : {false, true})
      for (const Tangents<T>* along : std::initializer_list<const Tangents<T>*>{nullptr, &tangents_of_all}) {
        const Index heads = average ? 1 : s_.H;
        const AttentionWeights<T> kernel(p_, lse_.get(), tensor4(weights_.get(), {s_.B, heads, s_.Lq, s_.Lk}), average,
                                         along);
        run_all(kernel.tasks(), kernel.scratch_bytes(), [&](Index task, Arena& arena) { kernel.run(task, arena); });
      }
    const Tensor4 grad = tensor4(grad_weights_.get(), {s_.B, s_.H, s_.Lq, s_.Lk});
    weights_backward(DenseGradient<T>(grad, T(1)));
    weights_backward(DenseGradient<T>(grad, T(1), grad), &tangents_of_all);
  }

  void summaries() {
    Tangents<T> tangents_of_all = tangents();
    tangents_of_all.lse = lse_dot_.get();
    for (const Tangents<T>* along : std::initializer_list<const Tangents<T>*>{&tangents_of_all, nullptr}) {
      const AttentionSummaries<T> kernel(
          p_, lse_.get(), {column_sum_.get(), entropy_.get(), maximum_.get(), along ? nullptr : argmax_.get()}, along);
      run_all(kernel.tasks(), kernel.scratch_bytes(), [&](Index task, Arena& arena) { kernel.run(task, arena); });
      for (Index task = 0; task < kernel.finish_tasks(); ++task) kernel.finish(task);
    }
    const SummaryGradients<T> grads{column_sum_.get(), entropy_.get(), maximum_.get()};
    weights_backward(SummaryGradient<T>(p_, argmax_.get(), grads));
    weights_backward(SummaryGradient<T>(p_, argmax_.get(), grads, grads), &tangents_of_all);
  }

  void weights_backward(const typename AttentionBackward<T, E>::Source& source, const Tangents<T>* tangents = nullptr) {
    BackwardResult<T, E> result = query_key_bias();
    result.negative_rows = grad_lse_.get();
    BackwardTangent<T> along;
    if (tangents) along.of = *tangents;
    backward_from(source, {{}, {}, lse_.get(), nullptr}, result, tangents ? &along : nullptr);
  }

  BackwardResult<T, E> query_key_bias() {
    BackwardResult<T, E> result;
    if (draw(0, 3)) result.grad_query = rows<E>(grad_q_.get(), s_.H, s_.Lq, s_.D);
    if (draw(0, 3)) result.grad_key = rows<E>(grad_k_.get(), s_.Hkv, s_.Lk, s_.D);
    if (p_.bias.defined() && draw(0, 3)) result.grad_bias = grad_bias_view_;
    if (p_.distance.defined() && draw(0, 3)) result.grad_distance = grad_distance_view_;
    return result;
  }

  void backward_from(const typename AttentionBackward<T, E>::Source& source, const BackwardInput<T, E>& input,
                     const BackwardResult<T, E>& result, const BackwardTangent<T>* along = nullptr) {
    if (s_.Lq == 0) return;
    const AttentionBackward<T, E> kernel(p_, input, result, source, along);
    kernel.compute([](Index tasks, double, size_t scratch_bytes, auto&& f) { run_all(tasks, scratch_bytes, f); });
  }

  double score(Index b, Index h, Index i, Index j) const {
    const Tensor4& x = p_.bias;
    const E *q = p_.q.at(b, h) + i * p_.q.row_stride, *k = p_.k.at(b, h / p_.group()) + j * p_.k.row_stride;
    double s = 0;
    const T* row = p_.distance.defined() ? p_.distance.row(b, h, j - i + s_.Lq - 1) : nullptr;
    for (Index d = 0; d < s_.D; ++d)
      s += double(q[d]) * (double(k[d]) + (p_.distance.has_keys ? double(row[1 + d]) : 0.0));
    s *= double(p_.scale);
    if (p_.softcap > 0) s = double(p_.softcap) * std::tanh(s / double(p_.softcap));
    if (row) s += double(row[0]);
    if (!x.defined()) return s;
    return s + double(bias_[b * x.strides[0] + h * x.strides[1] + i * x.strides[2] + j * x.strides[3]]);
  }

  // out, lse and weights of one row, from the formula.
  bool row_agrees(Index b, Index h, Index i) const {
    const Mask mask(p_.mask, b, h);
    std::vector<double> sums(s_.Dv, 0.0), weights(s_.Lk, 0.0);
    double total = p_.sinks ? std::exp(double(p_.sinks[h])) : 0.0;
    for (Index j = 0; j < s_.Lk; ++j) {
      const int32_t row = int32_t(i), key = int32_t(j);
      int32_t visible = -1, spare[kMaxMaskLeaves];
      const Tile one{&row, 1, row, row, key, key};
      if (mask.cover(one) == Cover::some) mask.fill<1>(one, &visible, spare, 1);
      if (mask.cover(one) == Cover::none || !visible) continue;
      const double p = weights[j] = std::exp(score(b, h, i, j));
      total += p;
      const T* added = p_.distance.has_values ? p_.distance.row(b, h, j - i + s_.Lq - 1) + 1 + s_.D : nullptr;
      for (Index d = 0; d < s_.Dv; ++d)
        sums[d] += p * (double(p_.v.at(b, h / p_.group())[j * p_.v.row_stride + d]) + (added ? double(added[d]) : 0.0));
    }
    const Index row = (b * s_.H + h) * s_.Lq + i;
    bool right = total == 0 ? std::isinf(lse_[row]) : std::abs(double(lse_[row]) - std::log(total)) < 1e-3;
    for (Index d = 0; d < s_.Dv; ++d)
      right &=
          std::abs(double(out_[row * s_.Dv + d]) - (total > 0 ? sums[d] / total : 0)) < (sizeof(E) == 2 ? 0.05 : 1e-3);
    for (Index j = 0; j < s_.Lk; ++j)
      right &= std::abs(double(weights_[row * s_.Lk + j]) - (total > 0 ? weights[j] / total : 0)) < 1e-3;
    return right;
  }

  bool agrees() {
    softmax();
    for (Index row = 0; row < s_.B * s_.H * s_.Lq; ++row)
      if (!row_agrees(row / s_.Lq / s_.H, row / s_.Lq % s_.H, row % s_.Lq)) return false;
    return true;
  }

  Shape s_;
  MaskSpec spec_;
  MaskTensors tensors_;
  Problem<T, E> p_;
  Index all_rows_ = s_.B * s_.H * s_.Lq, all_keys_ = s_.B * s_.Hkv * s_.Lk, all_pairs_ = all_rows_ * s_.Lk;
  Array<E> q_ = normal<E>(all_rows_ * s_.D), k_ = normal<E>(padded_size(s_.D)), v_ = normal<E>(padded_size(s_.Dv));
  Array<T> sinks_ = normal<T>(s_.H), bias_, grad_bias_, distance_, grad_distance_;
  Index columns_ = 0;  // of distance_
  std::vector<TableFacts> facts_;
  DistanceGradient<T> grad_distance_view_;
  Tensor4 grad_bias_view_;
  Array<E> out_ = array_of<E>(all_rows_ * s_.Dv), grad_out_ = normal<E>(all_rows_ * s_.Dv);
  Array<E> grad_q_ = array_of<E>(all_rows_ * s_.D), grad_k_ = array_of<E>(all_keys_ * s_.D);
  Array<E> grad_v_ = array_of<E>(all_keys_ * s_.Dv);
  Array<T> q_dot_ = normal<T>(all_rows_ * s_.D), k_dot_ = normal<T>(all_keys_ * s_.D);
  Array<T> v_dot_ = normal<T>(all_keys_ * s_.Dv), out_dot_ = array_of<T>(all_rows_ * s_.Dv);
  Array<T> lse_dot_ = array_of<T>(all_rows_);
  Array<T> lse_ = array_of<T>(all_rows_), grad_lse_ = normal<T>(all_rows_), grad_sinks_ = array_of<T>(s_.H);
  Array<T> weights_ = array_of<T>(all_pairs_), grad_weights_ = normal<T>(all_pairs_);
  Array<T> column_sum_ = array_of<T>(s_.B * s_.H * s_.Lk), entropy_ = array_of<T>(all_rows_);
  Array<T> maximum_ = array_of<T>(all_rows_);
  Array<int64_t> argmax_ = array_of<int64_t>(all_rows_);
  int64_t seed_ = 7;
};

template <class T, class E = T>
int run_trials(int rounds) {
  int wrong = 0;
  for (int round = 0; round < rounds; ++round)
    for (const std::string mask : kMasks) {
      Shape shape = draw_shape();
      if (mask.find("document") != std::string::npos) {
        shape.Lk = shape.Lq;
        // Masks are asked of eight tiles together, of which the last may be a part.
        if (const Index length = draw(449, 511); draw(0, 2) == 0) shape = {1, 1, 1, length, length, 7, 5};
      }
      if (Trial<T, E>(shape, mask).run()) continue;
      ++wrong;
      std::printf("wrong: B %d H %d/%d, %d x %d, D %d, Dv %d, mask '%s', %d bytes\n", int(shape.B), int(shape.H),
                  int(shape.Hkv), int(shape.Lq), int(shape.Lk), int(shape.D), int(shape.Dv), mask.c_str(),
                  int(sizeof(E)));
    }
  return wrong;
}

}  // namespace
}  // namespace attention_ops

int main(int, char** arguments) {
  const int rounds = arguments[1] ? std::atoi(arguments[1]) : 20;
  [[maybe_unused]] const attention_ops::FlushDenormals here;
#if defined(__AMX_TILE__)
  if (syscall(SYS_arch_prctl, 0x1023, 18)) return std::puts("the kernel refuses the matrix unit"), 0;
#endif
  const int wrong = attention_ops::run_trials<float>(rounds) + attention_ops::run_trials<double>(rounds) +
                    attention_ops::run_trials<float, attention_ops::BFloat16>(rounds);
  std::printf("%d-byte vectors, %d rounds: %d wrong\n", attention_ops::kVectorBytes, rounds, wrong);
  return wrong != 0;
}
