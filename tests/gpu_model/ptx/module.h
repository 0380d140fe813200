// A file of PTX: where its functions are, its constant tables, and the source files it was made from.
#pragma once
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace gpu_model::ptx {

std::string_view trimmed(std::string_view text);
// The pieces between commas that no bracket encloses.
std::vector<std::string> split(std::string_view text);

class Module {
 public:
  explicit Module(const std::string& path);
  Module(const Module&) = delete;

  bool has(const std::string& function) const { return functions_.count(function) > 0; }
  // From its name on to the end of the module.
  std::string_view function(const std::string& name) const;
  const std::map<std::string, std::vector<unsigned char>>& tables() const { return tables_; }
  const std::map<int, std::string>& sources() const { return sources_; }

 private:
  void read_line(std::string_view line, size_t begins);
  void read_table(std::string_view line);

  std::string text_;
  std::map<std::string, size_t> functions_;
  std::map<std::string, std::vector<unsigned char>> tables_;
  std::map<int, std::string> sources_;
};

}  // namespace gpu_model::ptx
