// The second way to run a kernel: the PTX that nvcc made of it, a warp at a time, with the same checks of memory. What
// the compiler really does is executed so, inline assembly included.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace gpu_model {

struct Block;

namespace ptx {

// Reads modules, files of PTX. `names` are kernels, `offsets` say where in this library the same kernels lie.
void load(const std::vector<std::string>& modules, const std::vector<std::string>& names,
          const std::vector<int64_t>& offsets);

// Runs the block's kernel from its PTX, on a block that has just been cleared.
void run_block(Block& block);

}  // namespace ptx
}  // namespace gpu_model
