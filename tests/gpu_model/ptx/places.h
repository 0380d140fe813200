// Where in the kernels' source an instruction comes from.
#pragma once
#include <map>
#include <string>
#include <string_view>
#include <tuple>

#include "model.h"

namespace gpu_model::ptx {

// Follows the .loc directives of a function. A place in a wrapper of the device or in CUDA's own headers is given as
// the line of the kernel that uses it.
class Places {
 public:
  explicit Places(const std::map<int, std::string>& sources) : sources_(sources) {}

  void read(std::string_view directive);
  Line now() const { return now_; }

 private:
  using Place = std::tuple<int, int, int>;  // file, line, column

  bool is_kernel(int file) const;

  const std::map<int, std::string>& sources_;
  std::map<Place, Place> used_at_;  // of what was inlined
  Line now_{"", 0};
};

}  // namespace gpu_model::ptx
