// Attention on the CPU: forward and backward. Compiled once per instruction set into a library of its own.
#include "cpu/attention.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "cpu/backward.h"
#include "kernels/cpu/attention_decode.h"
#include "kernels/cpu/attention_jvp.h"

namespace attention_ops {
namespace {

// Few rows over many keys; E is the type of the elements.
template <class E>
Pair decode(const Attention& a) {
  using T = Wide<E>;
  const Loaded<T, E> loaded(a);
  const Problem<T>& p = loaded.problem;
  const Tensor out = empty_rows<T>(a.query, {p.batch, p.heads, p.queries, p.value_width});
  const Tensor lse = empty_of<T>(a.query, {p.batch, p.heads, p.queries});
  const AttentionDecode<E> kernel(p, loaded.key(), loaded.value(), {result_view<T>(out), lse.mutable_data_ptr<T>()});
  run_tasks(kernel.tasks(), kernel.operations(), kernel.scratch_bytes(),
            [&](Index task, Arena& arena) { kernel.run(task, arena); });
  run_tasks(kernel.finish_tasks(), p.row_operations(), 0, [&](Index task, Arena&) { kernel.finish(task); });
  return {out.to(a.query.scalar_type()), lse};
}

}  // namespace

bool decodes(const Attention& a) {
  return is_decode(a.query.size(1), a.key.size(1), a.query.size(2)) && !has_rows_by_distance(a);
}

Pair forward_of(const Attention& a, const Rotation& of_queries) {
  TORCH_INTERNAL_ASSERT(!of_queries.table || !decodes(a));
  if (decodes(a)) return in_element_type(a.query, [&]<class E>() { return decode<E>(a); });
  return in_row_types(a, [&]<class T, class E>() -> Pair {
    const Loaded<T, E, E> loaded(a);
    const Turns<T> turns(of_queries);
    const Problem<T, E>& p = loaded.problem;
    const Tensor out = empty_rows<E>(a.query, {p.batch, p.heads, p.queries, p.value_width});
    const Tensor lse = empty_of<T>(a.query, {p.batch, p.heads, p.queries});
    const AttentionForward<T, E> kernel(p, {result_view<E>(out), lse.mutable_data_ptr<T>()}, turns.view());
    run_tasks(kernel.pack_tasks(), p.row_operations(), 0, [&](Index task, Arena&) { kernel.pack(task); });
    run_tasks(kernel.tasks(), p.pair_operations(), kernel.scratch_bytes(),
              [&](Index task, Arena& arena) { kernel.run(task, arena); });
    return {in_type(out, a.query.scalar_type()), lse};
  });
}

namespace {

Pair forward_cpu(const Attention& a) {
  return forward_of(a);
}

// The gradients, or their tangents in a direction.
template <class T, class E>
Six gradients_of(const Loaded<T, E, E>& loaded, const Attention& a, In out, In lse, Opt grad_out, Opt grad_lse,
                 std::array<bool, 6> needed, const BackwardTangent<T>* along = nullptr, const Rotation& of_queries = {},
                 const Rotation& of_keys = {}) {
  Gradients<T, E> grads;
  if (needed[0]) grads.query = empty_rows<E>(a.query, a.query.sizes());
  if (needed[1]) grads.key = empty_rows<E>(a.key, a.key.sizes());
  if (needed[2]) grads.value = empty_rows<E>(a.value, a.value.sizes());
  if (needed[3] && a.bias) grads.bias = on_large_pages(at::empty(a.bias->sizes(), a.bias->options()));
  if (needed[4] && a.distance) grads.distance = empty_of<T>(a.query, a.distance->sizes());
  if (needed[5] && a.sinks) grads.sinks = empty_of<T>(a.query, a.sinks->sizes());
  const Turns<T> query_turns(of_queries), key_turns(of_keys);
  grads.turn_query = query_turns.view(), grads.turn_key = key_turns.view();
  const Tensor grads_of_rows = grad_out ? *grad_out : at::zeros({1}, out.options()).expand_as(out);
  const Operand<E> out_rows(out), grad_rows = queries_of<E>(grads_of_rows, a, Place::grad_out);
  const Vector<T> lse_rows(lse), grad_lse_rows(grad_lse);
  const ValueGradient<T, E> source(loaded.problem.value_width);
  run_backward<T, E>(loaded.problem, {out_rows.view(), grad_rows.view(), lse_rows.data(), grad_lse_rows.data()}, grads,
                     source, along);
  return {finished(grads.query, a.query),
          finished(grads.key, a.key),
          finished(grads.value, a.value),
          finished(grads.bias, a.bias.value_or(a.query)),
          finished(grads.distance, a.distance.value_or(a.query)),
          finished(grads.sinks, a.sinks.value_or(a.query))};
}

}  // namespace

Six backward_of(const Attention& a, In out, In lse, Opt grad_out, Opt grad_lse, std::array<bool, 6> needed,
                const Rotation& of_queries, const Rotation& of_keys) {
  return in_row_types(a, [&]<class T, class E>() -> Six {
    return gradients_of<T, E>(Loaded<T, E, E>(a, /*is_backward=*/true), a, out, lse, grad_out, grad_lse, needed,
                              /*along=*/nullptr, of_queries, of_keys);
  });
}

namespace {

Six backward_cpu(const Attention& a, In out, In lse, Opt grad_out, Opt grad_lse, std::array<bool, 6> needed) {
  return backward_of(a, out, lse, grad_out, grad_lse, needed);
}

// Of out and lse; and out, not rounded to a half type.
template <class T>
Three tangents_of(const Loaded<T>& loaded, const LoadedTangents<T>& along, In out, In lse) {
  const Problem<T>& p = loaded.problem;
  const Tensor out_t = empty_rows<T>(out, {p.batch, p.heads, p.queries, p.value_width});
  const Tensor lse_t = empty_of<T>(lse, lse.sizes());
  const bool is_rounded = out.scalar_type() != kScalarType<T>;
  const Tensor counted = is_rounded ? at::empty_like(out_t) : out;
  const Operand<T> out_rows(counted);
  const Vector<T> lse_rows(lse);
  const AttentionJvp<T> kernel(
      p, along.view,
      {is_rounded ? Matrices<const T>{} : out_rows.view(), is_rounded ? result_view<T>(counted) : Matrices<T>{},
       lse_rows.data(), result_view<T>(out_t), lse_t.mutable_data_ptr<T>()});
  run_tasks(kernel.tasks(), 2.5 * p.pair_operations(), kernel.scratch_bytes(),
            [&](Index task, Arena& arena) { kernel.run(task, arena); });
  return {out_t, lse_t, counted};
}

Pair jvp_cpu(const Attention& a, In out, In lse, Opt query_t, Opt key_t, Opt value_t, Opt bias_t, Opt distance_t,
             Opt sinks_t) {
  return in_compute_type(a.query, [&]<class T>() -> Pair {
    const Loaded<T> loaded(a);
    const LoadedTangents<T> along(query_t, key_t, value_t, bias_t, distance_t, sinks_t);
    const auto [out_t, lse_t, exact] = tangents_of(loaded, along, out, lse);
    return {in_type(out_t, out.scalar_type()), lse_t};
  });
}

Eight double_backward_cpu(const Attention& a, In out, In lse, Opt grad_out, Opt grad_lse, Opt query_t, Opt key_t,
                          Opt value_t, Opt bias_t, Opt distance_t, Opt sinks_t, Opt grad_out_t, Opt grad_lse_t,
                          std::array<bool, 8> needed) {
  return in_compute_type(a.query, [&]<class T>() -> Eight {
    const Loaded<T> loaded(a, /*is_backward=*/true);
    const LoadedTangents<T> inputs(query_t, key_t, value_t, bias_t, distance_t, sinks_t);
    // What forward mode may have counted already, but out and lse come without their tangents.
    const auto [out_t, lse_t, exact] = tangents_of(loaded, inputs, out, lse);
    const LoadedTangents<T> along(query_t, key_t, value_t, bias_t, distance_t, sinks_t, lse_t);
    const Operand<T> out_t_rows(out_t), grad_t_rows(grad_out_t);
    const Vector<T> grad_lse_t_rows(grad_lse_t);
    const BackwardTangent<T> direction{along.view, out_t_rows.view(), grad_t_rows.view(), grad_lse_t_rows.data()};
    const auto [query, key, value, bias, distance, sinks] =
        gradients_of<T, T>(loaded, a, exact, lse, grad_out, grad_lse,
                           {needed[0], needed[1], needed[2], needed[3], needed[4], needed[5]}, &direction);
    return {query,
            key,
            value,
            bias,
            distance,
            sinks,
            needed[6] ? in_type(out_t, out.scalar_type()) : nothing(out),
            needed[7] ? lse_t : nothing(lse)};
  });
}

TORCH_LIBRARY_IMPL(attention_ops, CPU, m) {
  m.impl("_attention_forward", Flat<forward_cpu>::call);
  m.impl("_attention_backward", Flat<backward_cpu>::call);
  m.impl("_attention_jvp", Flat<jvp_cpu>::call);
  m.impl("_attention_double_backward", Flat<double_backward_cpu>::call);
}

}  // namespace
}  // namespace attention_ops
