// What the model knows of the block that runs: its threads, warps, and the history of its shared memory.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "fiber.h"
#include "model.h"

namespace gpu_model {

enum class State : uint8_t { ready, in_warp, at_barrier, done };

struct Copy {
  uint32_t to;
  const void* from;
  bool valid;
  Line line;
};

struct Lane {
  Fiber fiber;
  std::unique_ptr<char[]> stack;
  int number = 0;
  State state = State::ready;
  Line at;
  std::vector<Copy> open, committed;

  int warp() const { return number / 32; }
  int lane() const { return number % 32; }
  std::string name() const { return "thread " + std::to_string(number) + " (warp " + std::to_string(warp()) + ")"; }
};

// An operation that a whole warp must enter together.
struct Meeting {
  const char* what = nullptr;
  Line line;
  uint32_t arrived = 0;
  void* slot[32];
};

struct Warp {
  uint32_t present = 0, live = 0, ready = 0;
  uint32_t epoch = 0;  // counts barriers of this warp
  Meeting meeting;
};

// The history of four bytes of shared memory.
struct Cell {
  uint32_t write_epoch = 0, write_warp_epoch = 0, read_epoch = 0, read_warp_epoch = 0, readers = 0;
  int writer = -1, reader = -1;  // reader: -2 where there were several
  bool written = false, in_flight = false;
};

struct Block {
  int64_t blocks, number = 0;
  uint64_t launch = 0;  // one for each launch of this process
  int threads, waiting = 0, done = 0;
  uint32_t epoch = 1;
  bool aborted = false;
  uint64_t random = 1;
  std::vector<std::unique_ptr<Lane>> lanes;
  std::vector<Warp> warps;
  std::vector<unsigned char> memory;
  std::vector<Cell> cells;
  Lane* now = nullptr;
  Fiber main;
  const Kernel* kernel = nullptr;

  Lane& lane(int warp, int lane) { return *lanes[size_t(warp) * 32 + lane]; }
  Warp& warp() { return warps[now->warp()]; }
};

extern thread_local Block* current;

std::string place(Line line);
uint64_t next_random();  // from the options' seed
[[noreturn]] void abort_block();
void land_copies(Lane& lane);
bool fits_shared(uint32_t address, int bytes, const Lane& lane, Line line, const char* what);
void note_read(uint32_t address, int bytes, const Lane& lane, Line line);
void count_passes(const uint32_t (&addresses)[32], uint32_t lanes, int bytes);

// Where the lanes of a warp touch global memory in one instruction, each so many bytes; counts their sectors at the
// end.
class Sectors {
 public:
  explicit Sectors(int bytes) : bytes_(bytes) {}
  ~Sectors();
  void touch(uint64_t address) { addresses_[count_++] = address; }

 private:
  uint64_t addresses_[32];
  int bytes_, count_ = 0;
};

// What a lane leaves behind.
void end_lane(Lane& lane);

// ldmatrix.x4 and mma.sync.m16n8k16 of the warp that runs, each lane's registers in a row.
void load_matrices_of_warp(uint32_t (&out)[32][4], const uint32_t (&addresses)[32], bool transposed, Line line);
struct WarpProduct {
  uint32_t a[32][4], b[32][2];
  float d[32][4];
  void multiply_add(float (*widen)(uint16_t));
};

// Waits until every lane of the warp is here, then runs `run(meeting)` once.
void meet(const char* what, void* slot, Line line, const std::function<void(Meeting&)>& run);

}  // namespace gpu_model
