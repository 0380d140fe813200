// Runs CUDA kernels on the processor, one block at a time, each CUDA thread a fiber, and checks every access. A launch
// gives the same result for a given schedule. What is found piles up until somebody takes it.
#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace gpu_model {

// Where in the kernels' source an operation was issued.
struct Line {
  const char* file;
  unsigned line;
  static constexpr Line current(const char* file = __builtin_FILE(), unsigned line = __builtin_LINE()) {
    return {file, line};
  }
};

enum class Order { forward, reverse, shuffled };
struct Options {
  Order lanes = Order::forward;  // which thread goes next of those that can
  Order blocks = Order::forward;
  uint64_t seed = 1;
  bool late_copies = true;        // asynchronous copies land when they are waited for, or at once
  bool ptx = false;               // runs the PTX of the kernels instead of their source
  int shared_bytes = 227 * 1024;  // that a block may have
};

// Accesses of whole warps: passes over shared memory, sectors of 32 bytes that loads, stores and copies touch of global
// memory (where PTX runs, whose instructions are whole warps'), and the fewest that would do. Loads of global memory by
// threads.
struct Counters {
  int64_t multiplications = 0, barriers = 0, passes = 0, fewest_passes = 0, sectors = 0, fewest_sectors = 0, loads = 0;
};

Options& options();
Counters& counters();

// What was found since the last call: one text for each kind and place.
std::vector<std::string> take_findings();
void report(const char* kind, Line line, const std::string& text);

// A piece of global memory that kernels may touch. Everything else is out of bounds.
enum class Access { read, write, update };  // update: holds something before it is written
void watch(const std::string& name, const void* data, size_t bytes, size_t element, Access access);
bool is_watched(const void* data);
// Ends the watch of everything, and reports elements that should have been written and were not.
void end_watch();

// A kernel with the values of its parameters: to be called here, and as a GPU gets it.
struct Kernel {
  std::function<void()> call;
  const void* address = nullptr;
  std::vector<std::span<const unsigned char>> parameters;
};
void launch(int64_t blocks, int threads, int shared_bytes, const Kernel& kernel);

// --- called from kernels, through device.h ---
int thread();
int64_t block();
int64_t blocks();
void sync_threads(Line);
void sync_warp(Line);
uint64_t shuffle_xor(uint64_t value, int mask, Line);
uint32_t ballot(bool x, Line);
void read_shared(uint32_t address, void* to, int bytes, Line);
void write_shared(uint32_t address, const void* from, int bytes, Line);
void copy16(uint32_t to, const void* from, bool valid, Line);
void commit_copies();
void wait_for_copies();
void load_matrices(uint32_t (&r)[4], uint32_t address, bool transposed, Line);
void multiply_add(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], float (*widen)(uint16_t), Line);
enum class Global { read, write, atomic };
// Whether the bytes may be touched.
bool check_global(const void* p, int bytes, Global, Line);

}  // namespace gpu_model
