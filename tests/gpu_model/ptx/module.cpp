// Finds what a file of PTX holds.
#include "ptx/module.h"

#include <fstream>
#include <sstream>
#include <stdexcept>

namespace gpu_model::ptx {

std::string_view trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  if (first == text.npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\r\n") - first + 1);
}

std::vector<std::string> split(std::string_view text) {
  std::vector<std::string> pieces;
  int depth = 0;
  size_t begins = 0;
  for (size_t n = 0; n <= text.size(); ++n) {
    const char c = n < text.size() ? text[n] : ',';
    depth += (c == '{' || c == '[' || c == '(') - (c == '}' || c == ']' || c == ')');
    if (c != ',' || (depth != 0 && n < text.size())) continue;
    pieces.emplace_back(trimmed(text.substr(begins, n - begins)));
    begins = n + 1;
  }
  return pieces;
}

Module::Module(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("no PTX in " + path);
  text_.assign(std::istreambuf_iterator<char>(file), {});
  for (size_t begins = 0; begins < text_.size();) {
    const size_t ends = std::min(text_.find('\n', begins), text_.size());
    read_line(std::string_view(text_).substr(begins, ends - begins), begins);
    begins = ends + 1;
  }
}

void Module::read_line(std::string_view line, size_t begins) {
  const std::string_view text = trimmed(line);
  if (text.starts_with(".file")) {
    std::istringstream words{std::string(text.substr(5))};
    int number;
    words >> number;
    const size_t quote = text.find('"');
    sources_[number] = text.substr(quote + 1, text.rfind('"') - quote - 1);
  } else if (text.starts_with(".global") && text.find('=') != text.npos) {
    read_table(text);
  } else if (text.starts_with(".shared")) {
    throw std::runtime_error("shared memory of fixed size is not known here: " + std::string(text));
  } else if (text.find(".entry ") != text.npos || text.starts_with(".func ")) {
    // The name follows the result; a definition follows its declaration.
    const size_t skip = text.starts_with(".func") && trimmed(text.substr(5)).front() == '(' ? line.find(')') + 1
                        : text.starts_with(".func")                                         ? line.find(".func") + 5
                                                                                            : line.find(".entry ") + 7;
    const std::string_view rest = line.substr(skip);
    functions_[std::string(trimmed(rest.substr(0, rest.find('('))))] = begins;
  }
}

// .global .align 8 .b8 name[144] = {8, 93, ...};
void Module::read_table(std::string_view line) {
  const size_t bracket = line.find('['), brace = line.find('{');
  if (line.find(".b8 ") == line.npos || brace == line.npos)
    throw std::runtime_error("a table of other than bytes: " + std::string(line));
  const size_t name = line.rfind(' ', bracket) + 1;
  std::vector<unsigned char>& bytes = tables_[std::string(line.substr(name, bracket - name))];
  for (const std::string& number : split(line.substr(brace + 1, line.find('}') - brace - 1)))
    bytes.push_back(static_cast<unsigned char>(std::stoi(number)));
}

std::string_view Module::function(const std::string& name) const {
  return std::string_view(text_).substr(functions_.at(name));
}

}  // namespace gpu_model::ptx
