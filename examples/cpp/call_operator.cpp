// Attention and its gradients from C++: the same operator as in Python, in a program that links LibTorch alone.
//
//   torch=$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')
//   cmake -S examples/cpp -B build/cpp -DCMAKE_PREFIX_PATH=$torch
//   cmake --build build/cpp
//   build/cpp/call_operator attention_ops/libattention_ops.so attention_ops/libattention_ops_avx2.so
//
// (or the kernels of another instruction set that was built: `attention_ops.isa()` names the best). It computes causal
// attention over padded sequences, with grouped heads, and compares result and gradients with the plain formula in
// ATen. `attention` below is all that a program of your own needs: a handle of the operator, found once, with the types
// of its schema. What the operator refuses it throws as c10::Error. Where torch is built with CUDA, cmake wants the
// CUDA toolkit too.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>

#include <cmath>
#include <cstdio>
#include <exception>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <tuple>
#include <vector>

#include "libraries.h"

using at::Tensor;

struct Options {
  std::optional<Tensor> bias, sinks;
  std::optional<double> scale, softcap;
  double dropout_p = 0;
  std::optional<Tensor> seed, distance_bias, relative_key, relative_value;
  std::optional<Tensor> rope_table;  // of attention_ops::rope_table
  bool interleaved = false;
};

// (out [B, H, Lq, Dv], lse [B, H, Lq]) of query [B, H, Lq, D], key [B, Hkv, Lk, D] and value [B, Hkv, Lk, Dv].
// `mask` is the text of a mask, and `mask_data` has the tensors that it takes, in turn.
std::tuple<Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                     std::string_view mask = "", at::TensorList mask_data = {}, const Options& o = {}) {
  using Maybe = const std::optional<Tensor>&;
  using Signature = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, at::TensorList,
                                               std::string_view, Maybe, Maybe, std::optional<double>,
                                               std::optional<double>, double, Maybe, Maybe, Maybe, Maybe, Maybe, bool);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("attention_ops::attention", "").typed<Signature>();
  return op.call(query, key, value, mask_data, mask, o.bias, o.sinks, o.scale, o.softcap, o.dropout_p, o.seed,
                 o.distance_bias, o.relative_key, o.relative_value, o.rope_table, o.interleaved);
}

// The same from its formula, for "causal & padding" and equal lengths.
Tensor formula(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& lengths) {
  const int64_t group = query.size(1) / key.size(1);
  const Tensor keys = key.repeat_interleave(group, 1), values = value.repeat_interleave(group, 1);
  const Tensor scores = query.matmul(keys.mT()) / std::sqrt(static_cast<double>(query.size(3)));  // [B, H, L, L]
  const Tensor j = at::arange(key.size(2)), i = j.unsqueeze(1);
  const Tensor visible = (j <= i).logical_and(j < lengths.view({-1, 1, 1, 1}));
  return scores.masked_fill(~visible, -std::numeric_limits<double>::infinity()).softmax(-1).matmul(values);
}

void expect_close(const char* what, const Tensor& ours, const Tensor& wanted) {
  if (!at::allclose(ours, wanted, 1e-10, 1e-10)) throw std::runtime_error(what);
  std::printf("%s agrees\n", what);
}

void compare() {
  const Tensor lengths = at::tensor({7, 4});
  std::vector<Tensor> ours, plain;  // query, key, value
  for (const int64_t heads : {4, 2, 2}) {
    ours.push_back(at::randn({2, heads, 7, 8}, at::kDouble).requires_grad_());
    plain.push_back(ours.back().detach().clone().requires_grad_());
  }
  const Tensor out = std::get<0>(attention(ours[0], ours[1], ours[2], "causal & padding", {lengths}));
  const Tensor wanted = formula(plain[0], plain[1], plain[2], lengths);
  expect_close("out", out, wanted);

  out.square().sum().backward();
  wanted.square().sum().backward();
  const char* names[] = {"gradient of query", "gradient of key", "gradient of value"};
  for (size_t i = 0; i < ours.size(); ++i) expect_close(names[i], ours[i].grad(), plain[i].grad());
}

int main(int count, char** arguments) {
  try {
    load_operators(count - 1, arguments + 1);
    compare();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
