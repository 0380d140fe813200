// A model that was compiled ahead of time, run without Python: the package calls our operators, which are loaded first.
//
//   python examples/cpp/compile_package.py model.pt2
//   build/cpp/run_package model.pt2 attention_ops/libattention_ops.so attention_ops/libattention_ops_avx2.so
//
// How to build it, and which kernels to name, stands in call_operator.cpp. Batch and length were left open when the
// model was compiled; each line of what this program prints has a batch, a length, and the numbers of the model's
// output for x = sin(0, 1, 2, …).
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>
#include <exception>
#include <stdexcept>

#include "libraries.h"

constexpr int64_t kWidth = 16;  // of the model

void run(torch::inductor::AOTIModelPackageLoader& model, int64_t batch, int64_t length) {
  const at::Tensor x = at::arange(batch * length * kWidth, at::kFloat).sin().view({batch, length, kWidth});
  const at::Tensor lengths = at::arange(batch).remainder(length) + 1;  // of the samples, without their padding
  const at::Tensor out = model.run({x, lengths})[0].contiguous();      // [batch, length, kWidth]
  std::printf("%d %d", static_cast<int>(batch), static_cast<int>(length));
  for (int64_t i = 0; i < out.numel(); ++i) std::printf(" %.9g", out.const_data_ptr<float>()[i]);
  std::printf("\n");
}

int main(int count, char** arguments) {
  try {
    if (count < 3) throw std::runtime_error("run_package: expected a package and libraries, got less");
    load_operators(count - 2, arguments + 2);
    torch::inductor::AOTIModelPackageLoader model(arguments[1]);
    run(model, 3, 5);
    run(model, 1, 1);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
