// A kernel as the interpreter runs it: instructions with their operands resolved, and the functions that it calls.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "model.h"

namespace gpu_model::ptx {

enum class Type : uint8_t { pred, u8, u16, u32, u64, s8, s16, s32, s64, f32, f64, bf16, f16, bf16x2, f16x2 };

// An opcode as it is written, its types apart: cvt.rzi.u32.f64 is cvt.rzi of u32 and f64. Untyped bits are unsigned.
struct Opcode {
  std::string name;
  std::vector<Type> types;
};

struct Warp;
struct Instruction;
using Execute = void (*)(Warp& warp, const Instruction& in, uint32_t lanes);

// What an instruction does to the order of execution. `together`: the whole warp must be there.
enum class Flow : uint8_t { next, branch, call, leave, barrier, together };
enum class Space : uint8_t { generic, global, shared, local, parameters };

// A value that a call takes along, within a lane's frame.
struct Transfer {
  int from, to, bytes;
};

struct Instruction {
  Execute run = nullptr;
  Flow flow = Flow::next;
  Space space = Space::generic;
  bool negated = false, extends_sign = false;
  int guard = -1;             // the register of a predicate, or none
  int bytes = 0;              // of an element in memory
  std::vector<int> to, from;  // registers; an address is one of them
  int64_t offset[2] = {};     // of the first and the second address
  int target = 0;             // of a branch or a call
  std::vector<Transfer> arguments, results;
  Line line{};
  std::string text;
};

// Everything that operands name is a register, constants and the place of a thread too. Functions come before what
// calls them, and since none calls itself their registers and frames lie beside each other.
struct Program {
  std::vector<Instruction> code;
  int entry = 0, registers = 0;
  std::map<uint64_t, int> constants;      // value to register
  std::map<std::string, int> of_thread;   // %tid.x and the like
  std::vector<Transfer> parameters;       // of the kernel, in order; `to` in its block of parameters
  int frame_bytes = 0, most_threads = 0;  // a lane's locals, and what calls pass; 0: any
  std::vector<std::string> register_names;

  int new_register(const std::string& name) {
    register_names.push_back(name);
    return registers++;
  }
};

// The operation behind an opcode, or null where there is none.
Execute arithmetic(const Opcode& opcode);
Execute conversion(const Opcode& opcode);
Execute across_warp(const Opcode& opcode);
Execute memory_access(const Opcode& opcode);

int bytes_of(Type type);
bool is_signed(Type type);

}  // namespace gpu_model::ptx
