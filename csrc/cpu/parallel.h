// Runs a kernel's tasks on torch's threads. Each takes the next task when it is free; which thread runs one matters
// not.
#pragma once
#include <ATen/Parallel.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "kernels/cpu/problem.h"

namespace attention_ops {

constexpr double kSerialOperations = 2e6;  // less arithmetic than this is over before other threads have woken up

// A forked child has none of its parent's threads, and OpenMP would wait for them: it works alone.
inline const pid_t process_at_load = getpid();

// `operations` is about what all tasks together cost.
template <class F>
void run_tasks(Index tasks, double operations, size_t scratch_bytes, F&& f) {
  std::atomic<Index> next{0};
  const auto work = [&] {
    [[maybe_unused]] const FlushDenormals here;
    Arena arena(scratch_bytes);
    for (Index task = next++; task < tasks; task = next++) {
      arena.reset();
      f(task, arena);
    }
  };
  const Index threads = operations < kSerialOperations ? 1 : std::min<Index>(at::get_num_threads(), tasks);
  if (threads <= 1 || at::in_parallel_region() || getpid() != process_at_load) return work();
  at::parallel_for(0, threads, 1, [&](Index begin, Index end) {
    for (Index n = begin; n < end; ++n) work();
  });
}

}  // namespace attention_ops
