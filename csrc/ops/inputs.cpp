// Checks and normalisation of the arguments that every public operator starts with.
#include "ops/inputs.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/detach.h>
#include <ATen/ops/narrow.h>
#include <ATen/ops/new_zeros.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "ops/check.h"

namespace attention_ops {
namespace {

// The type an argument has inside: the forward casts under autocast, as torch's own attention does.
at::ScalarType type_inside(const Tensor& x) {
  const auto device = x.device().type();
  const bool casts = (device == at::kCPU || device == at::kCUDA) && at::autocast::is_autocast_enabled(device) &&
                     is_attention_type(x.scalar_type()) && x.scalar_type() != at::kDouble;
  return casts ? at::autocast::get_autocast_dtype(device) : x.scalar_type();
}

Tensor with_rank(Tensor x, int64_t rank) {
  while (x.dim() < rank) x = x.unsqueeze(0);
  return x;
}

// The common sizes of the dimensions before the heads, as matmul broadcasts them.
std::vector<c10::SymInt> broadcast_leading(const char* op, std::array<const Tensor*, 3> tensors, size_t count) {
  static constexpr const char* kNames[] = {"query", "key", "value"};
  std::vector<c10::SymInt> sizes(count, 1);
  for (size_t t = 0; t < tensors.size(); ++t)
    for (size_t d = 0; d < count; ++d) {
      const c10::SymInt size = tensors[t]->sym_size(d);
      if (surely(sizes[d].sym_eq(1))) {
        sizes[d] = size;
        continue;
      }
      TORCH_CHECK_VALUE(broadcasts(size, sizes[d]), op, ": expected ", kNames[t], " size ", sizes[d],
                        " or 1 at dimension ", d, " as in query, got ", size);
    }
  return sizes;
}

// [leading|1..., heads, L, width] -> [B, heads, L, width]
Tensor with_batch(Tensor x, const std::vector<c10::SymInt>& leading) {
  bool expands = false;
  for (size_t d = 0; d < leading.size(); ++d) expands |= !surely(x.sym_size(d).sym_eq(leading[d]));
  if (expands) {
    std::vector<c10::SymInt> sizes = x.sym_sizes().vec();
    std::copy(leading.begin(), leading.end(), sizes.begin());
    x = x.expand_symint(sizes);
  }
  return leading.size() == 1 ? x : x.flatten(0, static_cast<int64_t>(leading.size()) - 1);
}

}  // namespace

Inputs::Inputs(const Arguments& a) : op(a.op), mask(a.mask) {
  check_types(a);
  bring_to_four_dimensions(a);
  check_sizes();
  take_bias_and_sinks(a);
  take_distance(a);
  take_mask(a);
  take_numbers(a);
}

void Inputs::check_types(const Arguments& a) const {
  TORCH_CHECK_TYPE(is_attention_type(a.query.scalar_type()), op,
                   ": expected query dtype float64, float32, bfloat16 or float16, got ",
                   type_name(a.query.scalar_type()));
  const auto type = type_inside(a.query);
  const auto check = [&](const char* name, const Tensor& x, bool may_be_float) {
    const bool fits = type_inside(x) == type || (may_be_float && x.scalar_type() == at::kFloat);
    TORCH_CHECK_TYPE(fits, op, ": expected ", name, " dtype ", type_name(a.query.scalar_type()), " as in query",
                     may_be_float ? " or float32" : "", ", got ", type_name(x.scalar_type()));
    check_device(op, name, x, a.query);
  };
  check_device(op, "query", a.query, a.query);
  check("key", a.key, false);
  if (a.value) check("value", *a.value, false);
  const auto check_optional = [&](const char* name, Opt x) {
    if (x) check(name, *x, true);
  };
  check_optional("bias", a.bias), check_optional("distance_bias", a.distance_bias);
  check_optional("relative_key", a.relative_key), check_optional("relative_value", a.relative_value);
  check_optional("sinks", a.sinks);
}

void Inputs::bring_to_four_dimensions(const Arguments& a) {
  rank = std::max(a.query.dim(), a.key.dim());
  if (a.value) rank = std::max(rank, a.value->dim());
  const auto check = [&](const char* name, const Tensor& x) {
    TORCH_CHECK_VALUE(x.dim() >= 2, op, ": expected ", name, " with 2 or more dimensions [..., H, L, D], got ",
                      x.dim());
  };
  check("query", a.query), check("key", a.key);
  if (a.value) check("value", *a.value);

  const int64_t padded = std::max<int64_t>(rank, 4);
  const size_t count = padded - 3;
  query = with_rank(a.query, padded), key = with_rank(a.key, padded);
  value = a.value ? with_rank(*a.value, padded) : key.detach().narrow(-1, 0, 0);
  leading = broadcast_leading(op, {&query, &key, &value}, count);
  for (Tensor* x : {&query, &key, &value}) *x = with_batch(std::move(*x), leading);
  B = query.sym_size(0), H = query.sym_size(1), Hkv = key.sym_size(1);
  Lq = query.sym_size(2), Lk = key.sym_size(2);
}

void Inputs::check_sizes() const {
  const auto check = [&](const char* name, const char* property, const c10::SymInt& wanted, const char* other,
                         const c10::SymInt& actual) {
    TORCH_CHECK_VALUE(same(actual, wanted), op, ": expected ", name, " ", property, " ", wanted, " as in ", other,
                      ", got ", actual);
  };
  check("key", "width", query.sym_size(3), "query", key.sym_size(3));
  check("value", "length", Lk, "key", value.sym_size(2));
  check("value", "heads", Hkv, "key", value.sym_size(1));
  if (!surely(H.sym_eq(Hkv))) {
    const bool divides = !surely(Hkv.sym_eq(0)) && holds((H % Hkv).sym_eq(0));
    TORCH_CHECK_VALUE(divides, op, ": expected key heads that divide the ", H, " heads of query, got ", Hkv);
  }
  check_length(op, "query", Lq), check_length(op, "key", Lk);
}

void Inputs::take_bias_and_sinks(const Arguments& a) {
  if (a.bias) bias = align(*a.bias, "bias", "BHqk", 0);
  if (!a.sinks) return;
  TORCH_CHECK_VALUE(a.sinks->dim() == 1, op, ": expected sinks with 1 dimension [H], got ", a.sinks->dim());
  TORCH_CHECK_VALUE(same(a.sinks->sym_size(0), H), op, ": expected sinks length ", H, " as in the heads of query, got ",
                    a.sinks->sym_size(0));
  sinks = a.sinks;
}

// One table of what is given, [B|1, H|1, Lq + Lk - 1, columns]; zeros stand for a part before one that is.
void Inputs::take_distance(const Arguments& a) {
  std::vector<Tensor> parts;
  if (a.distance_bias) parts.push_back(align(*a.distance_bias, "distance_bias", "BHd", 0).unsqueeze(-1));
  const auto zeros = [&](const Tensor& like, const c10::SymInt& width) {
    return like.new_zeros_symint({1, 1, size_of('d', 0), width});
  };
  const Opt first = a.relative_key ? a.relative_key : a.relative_value;
  if (first && parts.empty()) parts.push_back(zeros(*first, 1));
  if (first)
    parts.push_back(a.relative_key ? align(*first, "relative_key", "BHdD", 0) : zeros(*first, query.sym_size(3)));
  if (a.relative_value) parts.push_back(align(*a.relative_value, "relative_value", "BHdV", 0));
  if (parts.size() > 1) {
    c10::SymInt batch = 1, heads = 1;
    for (const Tensor& x : parts) {
      if (!surely(x.sym_size(0).sym_eq(1))) batch = B;
      if (!surely(x.sym_size(1).sym_eq(1))) heads = H;
    }
    for (Tensor& x : parts) x = x.expand_symint({batch, heads, x.sym_size(2), x.sym_size(3)});
  }
  if (!parts.empty()) distance = parts.size() == 1 ? parts[0] : at::cat(parts, -1);
}

void Inputs::take_numbers(const Arguments& a) {
  TORCH_CHECK_VALUE(!a.scale || std::isfinite(*a.scale), op, ": expected scale finite, got ", *a.scale);
  TORCH_CHECK_VALUE(!a.softcap || (std::isfinite(*a.softcap) && *a.softcap > 0), op,
                    ": expected softcap finite and above 0, got ", *a.softcap);
  softcap = a.softcap.value_or(0);
  // Kernels compute in float32 but for float64: a number that would become 0 or infinity there is no option that works.
  const bool is_double = a.query.scalar_type() == at::kDouble;
  const double largest = is_double ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  const double asked = std::abs(a.scale.value_or(1)) * (a.softcap ? 1 / *a.softcap : 2);
  TORCH_CHECK_VALUE(asked < largest && softcap < largest / 2, op, ": expected scale and softcap within the range of ",
                    is_double ? "float64" : "float32", ", got scale ", a.scale.value_or(1), ", softcap ", softcap);
  if (a.scale) {
    scale = *a.scale;
    return;
  }
  // size() would fix every symbolic size of the tensor, sym_size() fixes the width alone.
  const int64_t D = query.sym_size(3).guard_int(__FILE__, __LINE__);
  scale = D == 0 ? 1 : 1 / std::sqrt(static_cast<double>(D));
}

Tensor Inputs::restore(const Tensor& x, bool has_heads) const {
  if (rank >= 5) return x.unflatten_symint(0, leading);
  if (rank == 4) return x;
  const Tensor single = x.select(0, 0);
  return rank == 3 || !has_heads ? single : single.select(0, 0);
}

}  // namespace attention_ops
