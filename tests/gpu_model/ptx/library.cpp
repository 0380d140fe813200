// Keeps modules, and reads a kernel from its module when it is first run.
#include "ptx/library.h"

#include <dlfcn.h>

#include <stdexcept>

#include "ptx/function_parser.h"
#include "ptx/ptx.h"

namespace gpu_model::ptx {
namespace {

struct Library {
  std::vector<std::unique_ptr<Module>> modules;
  std::map<const void*, std::string> names;
  std::map<const void*, Program> programs;
};
Library& library() {
  static Library all;
  return all;
}

Program read_program(const Module& module, const std::string& name) {
  Program program;
  std::map<std::string, Function> done;
  program.entry = FunctionParser(module, program, done).parse(name).entry;
  return program;
}

}  // namespace

void load(const std::vector<std::string>& modules, const std::vector<std::string>& names,
          const std::vector<int64_t>& offsets) {
  library() = {};
  for (const std::string& path : modules) library().modules.push_back(std::make_unique<Module>(path));
  Dl_info self;
  if (!dladdr(reinterpret_cast<const void*>(&load), &self)) throw std::runtime_error("no address of this library");
  for (size_t n = 0; n < names.size(); ++n)
    library().names[static_cast<const char*>(self.dli_fbase) + offsets.at(n)] = names[n];
}

const Program& program_of(const Kernel& kernel) {
  for (const auto& module : library().modules)
    for (const auto& [name, bytes] : module->tables()) watch(name, bytes.data(), bytes.size(), 1, Access::read);
  const auto found = library().programs.find(kernel.address);
  if (found != library().programs.end()) return found->second;
  const auto name = library().names.find(kernel.address);
  if (name == library().names.end()) throw std::runtime_error("a kernel whose name was not given");
  for (const auto& module : library().modules)
    if (module->has(name->second))
      return library().programs.try_emplace(kernel.address, read_program(*module, name->second)).first->second;
  throw std::runtime_error("no PTX of " + name->second);
}

std::vector<unsigned char> parameter_block(const Program& program, const Kernel& kernel) {
  std::vector<unsigned char> block;
  if (program.parameters.size() != kernel.parameters.size())
    throw std::runtime_error("another number of parameters in PTX");
  for (size_t n = 0; n < program.parameters.size(); ++n) {
    const Transfer& place = program.parameters[n];
    const auto& value = kernel.parameters[n];
    if (place.bytes != int(value.size())) throw std::runtime_error("a parameter of another size in PTX");
    block.resize(place.to + place.bytes);
    std::copy(value.begin(), value.end(), block.begin() + place.to);
  }
  return block;
}

}  // namespace gpu_model::ptx
