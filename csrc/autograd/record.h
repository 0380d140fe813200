// What the nodes of every attention primitive have in common: the shared arguments, saved and restored.
#pragma once
#include <algorithm>
#include <array>
#include <string>

#include "autograd/node.h"
#include "ops/ops.h"

namespace attention_ops {

inline Tensor defined_or_not(Opt x) {
  return x.value_or(Tensor());
}
inline OptionalTensor optional(In x) {
  return x.defined() ? OptionalTensor(x) : std::nullopt;
}

// A dual number's two parts. Only level 0 exists.
inline OptionalTensor tangent(In x) {
  return x.defined() ? optional(x._fw_grad(0)) : std::nullopt;
}
inline OptionalTensor tangent(Opt x) {
  return x ? tangent(*x) : std::nullopt;
}
inline Tensor primal(In x) {
  return torch::autograd::isFwGradDefined(x) ? x._fw_primal(0) : x;
}
inline OptionalTensor primal(Opt x) {
  return x ? optional(primal(*x)) : std::nullopt;
}

// The primal parts of a call's arguments.
class Primals {
 public:
  explicit Primals(const Attention& a)
      : query_(primal(a.query)),
        key_(primal(a.key)),
        value_(primal(a.value)),
        bias_(primal(a.bias)),
        distance_(primal(a.distance)),
        sinks_(primal(a.sinks)),
        of_(a) {}
  Attention view() const {
    return {query_,        key_,     value_,    bias_,       distance_,     sinks_,
            of_.mask_data, of_.mask, of_.scale, of_.softcap, of_.dropout_p, of_.seed};
  }

 private:
  Tensor query_, key_, value_;
  OptionalTensor bias_, distance_, sinks_;
  const Attention& of_;
};

inline void set_tangents(std::initializer_list<Tensor> results, std::initializer_list<Tensor> tangents) {
  for (size_t i = 0; i < results.size(); ++i)
    results.begin()[i]._set_fw_grad(tangents.begin()[i], /*level=*/0, /*is_inplace_op=*/false);
}

// What every node remembers beside its tensors.
struct Constants {
  std::string mask;
  double scale = 1, softcap = 0, dropout_p = 0;
  int64_t mask_count = 0;
};

enum Saved : size_t { kQuery, kKey, kValue, kBias, kDistance, kSinks, kSeed, kFirstMask };

struct AttentionFormula {
  Constants constants;

  static void visit(auto& self, auto&& f) {
    auto& c = self.constants;
    f(c.mask), f(c.scale), f(c.softcap), f(c.dropout_p), f(c.mask_count);
  }

 protected:
  struct Restored {
    OptionalTensor bias, distance, sinks, seed;
    Attention attention;
    at::TensorList extra;  // what the operator added

    Restored(const variable_list& saved, const Constants& c)
        : bias(optional(saved[kBias])),
          distance(optional(saved[kDistance])),
          sinks(optional(saved[kSinks])),
          seed(optional(saved[kSeed])),
          attention{saved[kQuery],
                    saved[kKey],
                    saved[kValue],
                    bias,
                    distance,
                    sinks,
                    at::TensorList(saved).slice(kFirstMask, c.mask_count),
                    c.mask,
                    c.scale,
                    c.softcap,
                    c.dropout_p,
                    seed},
          extra(at::TensorList(saved).slice(kFirstMask + c.mask_count)) {}
  };
};

// Inputs past `grads` have none.
inline variable_list keep(std::initializer_list<Tensor> grads, const std::vector<bool>& needed) {
  variable_list result(needed.size());
  for (size_t i = 0; i < grads.size(); ++i)
    if (needed[i]) result[i] = grads.begin()[i];
  return result;
}

template <size_t N>
std::array<bool, N> slice(const std::vector<bool>& needed, size_t from = 0) {
  std::array<bool, N> result{};
  for (size_t i = 0; i < N; ++i) result[i] = needed[from + i];
  return result;
}

// A node that has saved the shared arguments, or null if no input requires grad.
template <class Formula, class... Inputs>
auto record(const Attention& a, const Inputs&... inputs) {
  using Pointer = decltype(make_node<FormulaNode<Formula>>());
  if (!any_requires_grad(inputs...)) return Pointer();
  auto node = make_node<FormulaNode<Formula>>();
  node->set_next_edges(torch::autograd::collect_next_edges(inputs...));
  node->formula.constants = {std::string(a.mask), a.scale, a.softcap, a.dropout_p,
                             static_cast<int64_t>(a.mask_data.size())};
  node->save(a.query), node->save(a.key), node->save(a.value);
  for (const OptionalTensor* x : {&a.bias, &a.distance, &a.sinks, &a.seed}) node->save(defined_or_not(*x));
  for (const auto& x : a.mask_data) node->save(x);
  return node;
}

template <class Pointer>
void attach(const Pointer& node, std::initializer_list<Tensor> outputs) {
  for (const auto& x : outputs) torch::autograd::set_history(x, node);
}

// The same for results that stand empty where they are not needed.
template <class Pointer, size_t N>
void attach(const Pointer& node, std::initializer_list<Tensor> outputs, const std::array<bool, N>& needed) {
  for (size_t i = 0; i < N; ++i) torch::autograd::set_history(needed[i] ? outputs.begin()[i] : Tensor(), node);
}

inline Tensor plain(In x) {
  return x;
}
inline Tensor plain(Opt x) {
  return defined_or_not(x);
}

template <class Node, class... Tensors>
void save_all(const Node& node, const Tensors&... tensors) {
  (node->save(plain(tensors)), ...);
}

// Calls f, which dispatches on, with every derivative already taken care of.
template <class F>
auto below_autograd(F&& f) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return f();
}

[[noreturn]] inline void refuse(const std::string& op, const char* what) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "attention_ops::", op, ": expected ", what,
                              "; the plain formula in attention_ops.reference has every derivative");
}

// Forward mode over forward mode, and over second derivatives.
template <class... Inputs>
void refuse_tangents(const char* op, const Inputs&... inputs) {
  if (any_has_tangent(inputs...)) refuse(op, "no tangents (it gives those of forward mode), got some");
}

// By what is read alone.
template <class... Tensors>
void refuse_derivatives(const char* op, const char* names, const Tensors&... tensors) {
  if (any_has_tangent(tensors...) || any_requires_grad(tensors...))
    refuse(op, (std::string(names) + " without gradients or tangents, got some").c_str());
}

// An operator that gives second derivatives is linear in its tangents, which come first among the inputs of its node; a
// gradient of the others would be a third derivative.
inline void refuse_third_derivatives(const char* op, const std::vector<bool>& needed, size_t tangents) {
  if (std::find(needed.begin() + tangents, needed.end(), true) != needed.end())
    refuse(op, "derivatives up to the second, got a third");
}

}  // namespace attention_ops
