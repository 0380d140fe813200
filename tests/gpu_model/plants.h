// Kernels with bugs, by the name of what the model should find.
#pragma once
#include <string>
#include <vector>

namespace gpu_model {

std::vector<std::string> plant_names();
// With its bug, or right.
void run_plant(const std::string& name, bool right);

}  // namespace gpu_model
