// Reads a function of a module into the code of a program, and what it calls before it.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "ptx/module.h"
#include "ptx/places.h"
#include "ptx/program.h"

namespace gpu_model::ptx {

// A function that has been read: where it begins, and where a lane's frame holds what is passed to it and back.
struct Function {
  int entry = 0;
  std::vector<Transfer> parameters, results;  // `from` is the place in the frame
};

class FunctionParser {
 public:
  FunctionParser(const Module& module, Program& program, std::map<std::string, Function>& done);

  Function parse(const std::string& name);

 private:
  struct Symbol {
    Space space;
    int offset, bytes;
    bool formal;  // a function's own parameter
  };
  using Names = std::map<std::string, int>;

  size_t parse_head(std::string_view text, bool entry);
  void declare_parameter(std::string_view declaration, bool entry, std::vector<Transfer>& list);
  void parse_body(std::string_view text);
  bool directive(std::string_view line);
  void characters(std::string_view line);
  void statement(std::string_view text);
  void declaration(std::string_view text);
  Instruction instruction(std::string_view text);
  void operands(Instruction& in, const Opcode& opcode, const std::vector<std::string>& texts);
  void call(Instruction& in, const std::vector<std::string>& texts);
  void carry(Instruction& in, const Opcode& opcode);
  std::vector<Transfer> transfers(const std::string& names, const std::vector<Transfer>& formals, bool inwards);
  void take(std::vector<int>& registers, Instruction& in, const std::string& text, int& addresses);
  int operand(std::string_view text);
  int address(Instruction& in, std::string_view text, int which);
  int register_of(const std::string& name);
  int constant(uint64_t value);
  int allocate(int bytes);

  const Module& module_;
  Program& program_;
  std::map<std::string, Function>& done_;
  Places places_;
  Function function_;
  Names registers_, labels_;
  std::vector<Names> scopes_;  // names that inner braces declare
  std::map<std::string, Symbol> symbols_;
  std::vector<Instruction> code_;
  std::vector<std::string> jumps_;  // for each instruction the label it may go to
  std::string pending_;
  int depth_ = 0, carry_ = -1;
};

}  // namespace gpu_model::ptx
