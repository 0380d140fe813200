// The programs of the kernels that are loaded.
#pragma once
#include "ptx/program.h"

namespace gpu_model::ptx {

const Program& program_of(const Kernel& kernel);
// The values of a kernel's parameters as they lie in a GPU's memory.
std::vector<unsigned char> parameter_block(const Program& program, const Kernel& kernel);

}  // namespace gpu_model::ptx
