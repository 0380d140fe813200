// Autocast: scores are computed in the type torch chose for the device, in the forward and wherever weights are shown,
// so that they agree. Gradients see what the forward made. Biases and sinks may stay float32.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "ops/ops.h"

namespace attention_ops {
namespace {

template <c10::DeviceType Device>
struct Cast {
  const c10::impl::ExcludeDispatchKeyGuard below{at::autocast::get_autocast_dispatch_key_from_device_type(Device)};
  Tensor query, key, value;
  OptionalTensor bias, distance, sinks;
  const Attention& of;

  explicit Cast(const Attention& a)
      : query(cast(a.query)),
        key(cast(a.key)),
        value(cast(a.value)),
        bias(cast(a.bias)),
        distance(cast(a.distance)),
        sinks(cast(a.sinks)),
        of(a) {}

  Attention view() const {
    return {query,        key,     value,    bias,       distance,     sinks,
            of.mask_data, of.mask, of.scale, of.softcap, of.dropout_p, of.seed};
  }

 private:
  static Tensor cast(const Tensor& x) {
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(Device), x, Device);
  }
  static OptionalTensor cast(Opt x) { return !x || x->scalar_type() == at::kFloat ? x : OptionalTensor(cast(*x)); }
};

template <c10::DeviceType Device>
Pair forward_autocast(const Attention& a) {
  return forward().call(Cast<Device>(a).view());
}

template <c10::DeviceType Device>
Pair rotary_forward_autocast(const Attention& a, In table, bool interleaved) {
  return rotary_forward().call(Cast<Device>(a).view(), table, interleaved);
}

template <c10::DeviceType Device>
Tensor weights_autocast(const Attention& a, Opt lse, Opt heads, Opt rows, c10::SymInt queries, bool average) {
  return weights().call(Cast<Device>(a).view(), lse, heads, rows, queries, average);
}

template <c10::DeviceType Device>
Four summaries_autocast(const Attention& a, In lse) {
  return summaries().call(Cast<Device>(a).view(), lse);
}

template <c10::DeviceType Device>
void register_all(torch::Library& m) {
  m.impl("_attention_forward", Flat<forward_autocast<Device>>::call);
  m.impl("_rotary_attention_forward", Flat<rotary_forward_autocast<Device>>::call);
  m.impl("_attention_weights", Flat<weights_autocast<Device>>::call);
  m.impl("_attention_summaries", Flat<summaries_autocast<Device>>::call);
}

TORCH_LIBRARY_IMPL(attention_ops, AutocastCPU, m) {
  register_all<at::kCPU>(m);
}
TORCH_LIBRARY_IMPL(attention_ops, AutocastCUDA, m) {
  register_all<at::kCUDA>(m);
}

}  // namespace
}  // namespace attention_ops
