// vmap for every private operator: the mapped dimension is folded into the batch, [N, B, ...] -> [N * B, ...], and
// split again in the results. One boxed kernel walks the arguments of any of them, for torch.func.vmap and for the
// older vmap that autograd.grad(is_grads_batched=True), jacobian(vectorize=True) and gradcheck still use.
#include <ATen/functorch/BatchedTensorImpl.h>  // before the legacy header: the other order is ambiguous

#include <ATen/LegacyBatchedTensorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_add_batch_dim.h>
#include <ATen/ops/_remove_batch_dim.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/stack.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace attention_ops {
namespace {

using at::Tensor;
using c10::IValue;

struct Level {
  int64_t number = -1;
  c10::SymInt N = 1;
};

// How one kind of vmap wraps its tensors. The innermost level is handled; the others stay wrapped for later.
struct FuncTorch {
  static constexpr auto kKey = c10::DispatchKey::FuncTorchBatched;

  static Level innermost(const Tensor& x) {
    const auto* batched = at::functorch::maybeGetBatchedImpl(x);
    return batched ? Level{batched->level(), batched->value().sym_size(batched->bdim())} : Level{};
  }
  static Tensor unwrap(const Tensor& x, const Level& level) {  // [N or 1, ...]
    const auto* batched = at::functorch::maybeGetBatchedImpl(x);
    return batched && batched->level() == level.number ? batched->value().movedim(batched->bdim(), 0) : x.unsqueeze(0);
  }
  static Tensor wrap(const Tensor& x, const Level& level) { return at::functorch::makeBatched(x, 0, level.number); }
};

struct Legacy {
  static constexpr auto kKey = c10::DispatchKey::Undefined;  // nothing to exclude: other levels come back here

  static Level innermost(const Tensor& x) {
    const auto* batched = at::maybeGetBatchedImpl(x);
    if (!batched) return {};
    const auto last = batched->bdims().back();  // levels ascend
    return {last.level(), batched->value().sym_size(last.dim())};
  }
  static Tensor unwrap(const Tensor& x, const Level& level) {
    return innermost(x).number == level.number ? at::_remove_batch_dim_symint(x, level.number, level.N, 0)
                                               : x.unsqueeze(0);
  }
  static Tensor wrap(const Tensor& x, const Level& level) { return at::_add_batch_dim(x, 0, level.number); }
};

bool is_tensor(const IValue& x) {
  return x.isTensor() && x.toTensor().defined();
}

template <class Visit>
void visit_tensors(const std::vector<IValue>& inputs, Visit&& visit) {
  for (const auto& input : inputs) {
    if (is_tensor(input)) visit(input.toTensor());
    if (input.isTensorList())
      for (const Tensor& x : input.toTensorVector()) visit(x);
  }
}

template <class Map>
void map_tensors(std::vector<IValue>& inputs, Map&& map) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (is_tensor(inputs[i])) inputs[i] = map(i, inputs[i].toTensor());
    if (!inputs[i].isTensorList()) continue;
    std::vector<Tensor> list = inputs[i].toTensorVector();
    for (Tensor& x : list) x = map(i, x);
    inputs[i] = std::move(list);
  }
}

std::vector<Tensor> call(const c10::OperatorHandle& op, const std::vector<IValue>& inputs) {
  c10::Stack stack(inputs.begin(), inputs.end());
  op.callBoxed(&stack);
  std::vector<Tensor> results;
  for (const auto& x : stack) results.push_back(x.toTensor());
  return results;
}

constexpr const char* kWithoutBatch[] = {"sinks", "sinks_t", "heads", "rows", "inv_freq"};

// A call of one operator at one level.
template <class Kind>
struct Mapped {
  const c10::OperatorHandle& op;
  std::vector<IValue> inputs;
  Level level{};

  bool has(const char* name) const { return op.schema().argumentIndexWithName(name).has_value(); }
  size_t position(const char* name) const { return *op.schema().argumentIndexWithName(name); }
  const IValue& at(const char* name) const { return inputs[position(name)]; }
  bool is_given(const char* name) const { return has(name) && is_tensor(at(name)); }
  bool is_mapped(const char* name) const {
    return is_given(name) && Kind::innermost(at(name).toTensor()).number == level.number;
  }
  bool gives_gradients() const { return has("needed"); }
  bool returns(size_t i, std::string_view name) const { return op.schema().returns()[i].name().starts_with(name); }
  bool gives_grad_sinks() const {
    constexpr size_t kSinks = 5;  // of the results, and of those that are needed
    return is_given("sinks") && op.schema().returns().size() > kSinks && returns(kSinks, "grad_sinks") &&
           at("needed").toBoolList().get(kSinks);
  }

  // The argument whose batch the mapped dimension joins.
  const char* folded() const { return has("query") ? "query" : has("x") ? "x" : "positions"; }

  // What has no batch dimension cannot be folded: sinks, whose gradient would be summed over the samples, the numbers
  // of heads and rows, and frequencies. The samples are then computed one after another.
  bool needs_loop() const {
    const auto maps = [&](const char* name) { return is_mapped(name); };
    return !has(folded()) || gives_grad_sinks() || std::ranges::any_of(kWithoutBatch, maps);
  }
};

template <class Kind>
std::vector<Tensor> loop_over_samples(const Mapped<Kind>& mapped) {
  const int64_t N = mapped.level.N.guard_int(__FILE__, __LINE__);
  std::vector<std::vector<Tensor>> samples;
  for (int64_t n = 0; n < N; ++n) {
    std::vector<IValue> inputs = mapped.inputs;
    map_tensors(inputs, [&](size_t, const Tensor& x) {
      return Kind::innermost(x).number == mapped.level.number ? Kind::unwrap(x, mapped.level).select(0, n) : x;
    });
    const std::vector<Tensor> results = call(mapped.op, inputs);
    samples.resize(results.size());
    for (size_t i = 0; i < results.size(); ++i) samples[i].push_back(results[i]);
  }
  TORCH_CHECK_VALUE(N > 0, mapped.op.schema().name(), ": expected vmap over 1 or more samples, got 0");
  std::vector<Tensor> stacked;
  for (const auto& results : samples) stacked.push_back(Kind::wrap(at::stack(results), mapped.level));
  return stacked;
}

// [N or 1, B or 1, ...] -> [N * B, ...]
Tensor fold(const Tensor& x, const c10::SymInt& N, const c10::SymInt& B) {
  std::vector<c10::SymInt> sizes = x.sym_sizes().vec();
  sizes[0] = N, sizes[1] = B;
  return x.expand_symint(sizes).flatten(0, 1);
}

// A seed [N or 1, 1] becomes rows (seed, batch number), so that each sample draws what it would draw alone.
Tensor number_rows(const Tensor& x, const c10::SymInt& N, const c10::SymInt& B) {
  const Tensor seeds = x.expand_symint({N, B});
  return at::stack({seeds, at::arange(B, seeds.options()).expand_symint({N, B})}, -1);
}

template <class Kind>
std::vector<Tensor> fold_into_batch(const Mapped<Kind>& mapped) {
  const Level& level = mapped.level;
  const c10::SymInt B = mapped.at(mapped.folded()).toTensor().sym_size(0);
  const auto sums_batch = [&](const char* name) {
    return mapped.is_given(name) && mapped.at(name).toTensor().sym_size(0) != B;
  };
  const auto is_one_of = [&](size_t i, std::span<const char* const> names) {
    return std::ranges::find(names, mapped.op.schema().arguments()[i].name()) != names.end();
  };
  constexpr const char *kBroadcast[] = {"mask_data", "positions", "table"}, *kSeed[] = {"seed"};
  constexpr const char* kBiases[] = {"bias", "bias_t", "distance", "distance_t"};

  std::vector<IValue> inputs = mapped.inputs;
  map_tensors(inputs, [&](size_t i, const Tensor& x) {
    if (is_one_of(i, kWithoutBatch)) return x;
    // What every sample shares broadcasts as it is, unless its gradient has to come out per sample.
    const bool is_shared = Kind::innermost(x).number != level.number && x.sym_size(0) == 1;
    if (is_shared && is_one_of(i, kBroadcast)) return x;
    if (is_shared && is_one_of(i, kBiases) && !mapped.gives_gradients()) return x;
    const Tensor unwrapped = Kind::unwrap(x, level);
    return fold(is_one_of(i, kSeed) && x.dim() == 1 ? number_rows(unwrapped, level.N, B) : unwrapped, level.N, B);
  });

  std::vector<Tensor> results = call(mapped.op, inputs);
  for (size_t i = 0; i < results.size(); ++i) {
    if (results[i].dim() == 1) continue;  // a gradient that was not asked for
    Tensor split = results[i].unflatten_symint(0, {level.N, B});
    if ((mapped.returns(i, "grad_bias") && sums_batch("bias")) ||
        (mapped.returns(i, "grad_distance") && sums_batch("distance")))
      split = split.sum(1, /*keepdim=*/true);
    results[i] = Kind::wrap(split, level);
  }
  return results;
}

template <class Kind>
void vmap(const c10::OperatorHandle& op, c10::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  Mapped<Kind> mapped{op, torch::jit::last(*stack, count).vec()};
  visit_tensors(mapped.inputs, [&](const Tensor& x) {
    if (const Level found = Kind::innermost(x); found.number > mapped.level.number) mapped.level = found;
  });
  const c10::impl::ExcludeDispatchKeyGuard below(Kind::kKey);
  const auto results = mapped.needs_loop() ? loop_over_samples(mapped) : fold_into_batch(mapped);
  torch::jit::drop(*stack, count);
  stack->insert(stack->end(), results.begin(), results.end());
}

template <class Kind>
void register_all(torch::Library& m) {
  for (const char* name :
       {"_attention_forward", "_attention_backward", "_attention_jvp", "_attention_double_backward",
        "_attention_weights", "_attention_weights_backward", "_attention_weights_jvp",
        "_attention_weights_double_backward", "_attention_summaries", "_attention_summaries_backward",
        "_attention_summaries_jvp", "_attention_summaries_double_backward", "_dropout_mask", "_rope_table", "_rope"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<vmap<Kind>>());
}

TORCH_LIBRARY_IMPL(attention_ops, FuncTorchBatched, m) {
  register_all<FuncTorch>(m);
}
TORCH_LIBRARY_IMPL(attention_ops, Batched, m) {
  register_all<Legacy>(m);
}

}  // namespace
}  // namespace attention_ops
