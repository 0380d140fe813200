// Puts the CUDA kernels, run by the model, in the place of the CPU's for as long as a test asks for it.
#include <torch/library.h>

#include <memory>

#include "cuda/operators.h"
#include "model.h"
#include "ops/rotary_attention.h"
#include "plants.h"
#include "ptx/ptx.h"

namespace attention_ops {
namespace {

void use(bool on) {
  static std::unique_ptr<torch::Library> library;
  library.reset();
  if (!on) return;
  library = std::make_unique<torch::Library>(torch::Library::IMPL, "attention_ops", c10::DispatchKey::CPU, __FILE__,
                                             __LINE__);
  register_operators(*library);
  // As on a device without kernels of its own for them.
  library->impl("_rotary_attention_forward", Flat<rotary_attention>::call);
  library->impl("_rotary_attention_backward", Flat<rotary_gradients>::call);
}

// Schedules: 0 forward, 1 reverse, 2 shuffled.
void set_options(int64_t lanes, int64_t blocks, int64_t seed, bool late_copies, bool ptx, int64_t shared_kilobytes) {
  gpu_model::options() = {
      gpu_model::Order(lanes),     gpu_model::Order(blocks), static_cast<uint64_t>(seed), late_copies, ptx,
      int(shared_kilobytes) * 1024};
}

c10::Dict<std::string, int64_t> take_counters() {
  const gpu_model::Counters c = std::exchange(gpu_model::counters(), {});
  c10::Dict<std::string, int64_t> all;
  all.insert("multiplications", c.multiplications), all.insert("barriers", c.barriers), all.insert("loads", c.loads);
  all.insert("passes", c.passes), all.insert("fewest_passes", c.fewest_passes);
  all.insert("sectors", c.sectors), all.insert("fewest_sectors", c.fewest_sectors);
  return all;
}

TORCH_LIBRARY(attention_ops_gpu_model, m) {
  m.def("use(bool on) -> ()", use);
  m.def(
      "set_options(int lanes, int blocks, int seed, bool late_copies, bool ptx=False, "
      "int shared_kilobytes=227) -> ()",
      set_options);
  m.def("load_ptx(str[] modules, str[] names, int[] offsets) -> ()", gpu_model::ptx::load);
  m.def("take_counters() -> Dict(str, int)", take_counters);
  m.def("take_findings() -> str[]", gpu_model::take_findings);
  m.def("plant_names() -> str[]", gpu_model::plant_names);
  m.def("run_plant(str name, bool right) -> ()", gpu_model::run_plant);
}

}  // namespace
}  // namespace attention_ops
