// Reads .loc directives.
#include "ptx/places.h"

#include <sstream>

namespace gpu_model::ptx {

bool Places::is_kernel(int file) const {
  const auto found = sources_.find(file);
  if (found == sources_.end()) return false;
  const std::string& name = found->second;
  return (name.find("/csrc/") != name.npos || name.find("/gpu_model/") != name.npos) && !name.ends_with("/device.h");
}

// .loc 8 134 3, function_name $L__info_string3, inlined_at 2 49 3
void Places::read(std::string_view directive) {
  const auto place_after = [&](size_t from) {
    std::istringstream words{std::string(directive.substr(from))};
    int file = 0, line = 0, column = 0;
    words >> file >> line >> column;
    return Place{file, line, column};
  };
  Place place = place_after(4);
  if (const size_t at = directive.find("inlined_at"); at != directive.npos) used_at_[place] = place_after(at + 10);
  for (int depth = 0; depth < 20 && !is_kernel(std::get<0>(place)); ++depth) {
    const auto outer = used_at_.find(place);
    if (outer == used_at_.end()) break;
    place = outer->second;
  }
  const auto file = sources_.find(std::get<0>(place));
  now_ = {file == sources_.end() ? "" : file->second.c_str(), unsigned(std::get<1>(place))};
}

}  // namespace gpu_model::ptx
