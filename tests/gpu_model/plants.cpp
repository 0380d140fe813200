// Small kernels with one bug each, to test that the model finds it; and the same without, to test that it is silent.
#include <map>

#include "kernels/cuda/device.h"
#include "plants.h"

namespace gpu_model {
namespace {

namespace device = attention_ops::device;

constexpr int kThreads = 64;

struct Arrays {
  float in[kThreads] = {}, out[2 * kThreads] = {};
};

// Each thread reads what the next one wrote.
void neighbours(Arrays& g, bool barrier) {
  const auto shared = device::shared<float>(0);
  const int t = device::thread();
  shared[t] = float(t);
  if (barrier) device::sync_threads();
  device::store(g.out + t, float(shared[(t + 1) % kThreads]));
}

void reuse(Arrays& g, bool barrier) {
  neighbours(g, true);
  if (barrier) device::sync_threads();
  device::shared<float>(0)[device::thread()] = 1;
}

void within_warp(Arrays& g, bool barrier) {
  const auto shared = device::shared<float>(0);
  const int t = device::thread();
  shared[t] = float(t);
  if (barrier) device::sync_warp();
  device::store(g.out + t, float(shared[t ^ 1]));
}

void copy(Arrays& g, bool wait) {
  const int t = device::thread();
  if (t < 16) device::copy16(device::shared_address(t * 16), g.in + t * 4, true);
  device::commit_copies();
  if (wait) device::wait_for_copies();
  device::sync_threads();
  device::store(g.out + t, float(device::shared<float>(0)[t]));
  device::wait_for_copies();
}

void barrier_in_a_branch(Arrays& g, bool right) {
  if (right || device::thread() < 32) device::sync_threads();
  device::store(g.out + device::thread(), 1.f);
}

void two_barriers(Arrays& g, bool right) {
  if (right || device::thread() < 32)
    device::sync_threads();
  else
    device::sync_threads();
  device::store(g.out + device::thread(), 1.f);
}

void warp_in_a_branch(Arrays& g, bool right) {
  float x = 1;
  if (right || device::thread() % 2 == 0)
    x = device::shuffle_xor(x, 1);
  else
    x = float(device::ballot(true));
  device::store(g.out + device::thread(), x);
}

void matrices(Arrays& g, bool swizzled) {
  const int t = device::thread();
  for (int n = t; n < 1024; n += kThreads) device::store_shared(device::shared_address(n * 4), 0);
  device::sync_threads();
  uint32_t r[4];
  const int row = t % 8, chunk = t % 32 / 8;
  device::load_matrices<false>(r, device::shared_address(row * 128 + (swizzled ? chunk ^ row : chunk) * 16));
  device::store(g.out + t, float(r[0]));
}

using Kernel = void (*)(Arrays&, bool right);

const std::map<std::string, Kernel> kPlants = {
    {"race-read-after-write", neighbours},
    {"race-write-after-read", reuse},
    {"race-within-warp", within_warp},
    {"copy-not-waited", copy},
    {"barrier-after-exit", barrier_in_a_branch},
    {"divergent-barrier", two_barriers},
    {"divergent-warp", warp_in_a_branch},
    {"bank-conflict", matrices},
    {"shared-never-written",
     [](Arrays& g, bool right) {
       const auto shared = device::shared<float>(0);
       if (right) shared[device::thread()] = 1;
       device::store(g.out + device::thread(), float(shared[device::thread()]));
     }},
    {"shared-out-of-bounds",
     [](Arrays& g, bool right) {
       device::shared<float>(0)[device::thread() + (right ? 0 : 4096)] = 1;
       device::store(g.out + device::thread(), 1.f);
     }},
    {"misaligned",
     [](Arrays& g, bool right) {
       device::store_shared(device::shared_address(device::thread() * 8 + !right), 1);
       device::store(g.out + device::thread(), 1.f);
     }},
    {"global-out-of-bounds",
     [](Arrays& g, bool right) {
       device::store(g.out + device::thread(), device::load(g.in + device::thread() + (right ? 0 : 4 * kThreads)));
     }},
    {"write-to-input",
     [](Arrays& g, bool right) {
       device::store(g.out + device::thread(), 1.f);
       if (!right) device::store(g.in + device::thread(), 1.f);
     }},
    {"global-race",
     [](Arrays& g, bool right) {
       if (right && device::block() > 0) return;
       device::store(g.out + device::thread(), 1.f);
     }},
    {"never-written",
     [](Arrays& g, bool right) {
       if (right || device::thread() > 5) device::store(g.out + device::thread(), 1.f);
     }},
};

}  // namespace

std::vector<std::string> plant_names() {
  std::vector<std::string> names;
  for (const auto& [name, kernel] : kPlants) names.push_back(name);
  return names;
}

void run_plant(const std::string& name, bool right) {
  Arrays g;
  watch("in", g.in, sizeof g.in, 4, Access::read);
  watch("out", g.out, kThreads * 4, 4, Access::write);
  launch(name == "global-race" ? 2 : 1, kThreads, 4096, {[&] { kPlants.at(name)(g, right); }, nullptr, {}});
  end_watch();
}

}  // namespace gpu_model
