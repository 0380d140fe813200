// A graph node whose backward is a pure function, and the few lines that differ between torch versions.
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <concepts>
#include <mutex>
#include <string>
#include <vector>

namespace attention_ops {

using at::Tensor;
using torch::autograd::variable_list;
using NodePtr = decltype(torch::autograd::Edge::function);  // shared_ptr up to torch 2.12, intrusive_ptr from 2.13

template <class T>
auto make_node() {
  if constexpr (std::same_as<NodePtr, std::shared_ptr<torch::autograd::Node>>) {
    return std::shared_ptr<T>(new T, [](T* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<T>();
  }
}

// torch.autograd.graph.node_creation_hook exists from torch 2.14.
template <class Pointer>
void announce(const Pointer& node) {
  if constexpr (requires { fire_node_creation_hooks(node); }) fire_node_creation_hooks(node);
}

template <class... Tensors>
bool any_requires_grad(const Tensors&... tensors) {
  return torch::autograd::compute_requires_grad(tensors...);
}

template <class... Tensors>
bool any_has_tangent(const Tensors&... tensors) {
  return (torch::autograd::isFwGradDefined(tensors) || ...);
}

// `Formula` has the constants of the call as members, `name`, a static `visit(self, f)` over the members that compiled
// autograd keys its cache on, and operator()(grads, saved, needed), which gives one gradient, or an undefined tensor,
// per input.
template <class Formula>
struct FormulaNode final : torch::autograd::Node {
  Formula formula;

  FormulaNode() { saved_.reserve(8); }  // as many as plain attention saves: growing would move them

  std::string name() const override { return Formula::name; }

  void save(const Tensor& x, bool is_output = false) { saved_.emplace_back(x, is_output); }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    variable_list tensors;
    tensors.reserve(saved_.size());
    for (const auto& x : saved_) tensors.push_back(x.unpack(getptr()));
    std::vector<bool> needed(num_outputs());
    for (size_t i = 0; i < needed.size(); ++i) needed[i] = task_should_compute_output(i);
    for (const auto& grad : grads)
      if (grad.defined()) return formula(grads, tensors, needed);
    return variable_list(num_outputs());
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    for (auto& x : saved_) x.reset_data();
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(saved_, /*is_output=*/true);
    Formula::visit(formula, [&](const auto& constant) { args.collect(constant); });
  }

  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& swap) override {
    swap.before(saved_);
    // A size among the constants is a symbol while the backward is traced.
    Formula::visit(formula, [&](auto& constant) { swap.before(constant); });
    variable_list result = apply(variable_list(grads));
    swap.after(saved_);
    Formula::visit(formula, [&](auto& constant) { swap.after(constant); });
    return result;
  }

 private:
  std::vector<torch::autograd::SavedVariable> saved_;
};

}  // namespace attention_ops
