// Shared memory with its races, asynchronous copies, and global memory with its bounds.
#include <algorithm>
#include <bit>
#include <cstring>

#include "state.h"

namespace gpu_model {
namespace {

struct Region {
  std::string name;
  const char* data;
  size_t bytes, element;
  Access access;
  std::vector<uint64_t> writer;  // for each element: 0 never, else the launch and block that wrote it last

  bool holds(const void* p, size_t n) const {
    const char* c = static_cast<const char*>(p);
    return c >= data && c + n <= data + bytes;
  }
};
std::vector<Region>& regions() {
  static thread_local std::vector<Region> all;
  return all;
}

constexpr uint64_t kAtomic = ~uint64_t(0);

bool unordered_after_write(const Cell& c, const Lane& lane) {
  if (c.write_epoch != current->epoch || c.writer == lane.number) return false;
  return c.writer / 32 != lane.warp() || c.write_warp_epoch == current->warps[lane.warp()].epoch;
}

std::string byte(uint32_t cell) {
  return "shared byte " + std::to_string(cell * 4);
}

void check_write(const Cell& c, uint32_t cell, const Lane& lane, Line line) {
  if (c.in_flight)
    report("copy-not-waited", line, lane.name() + " writes " + byte(cell) + " while a copy into it is in flight");
  else if (unordered_after_write(c, lane))
    report("race-write-after-write", line, lane.name() + " overwrites " + byte(cell) + " with no barrier between");
  if (c.read_epoch != current->epoch) return;
  const bool other_warp = c.readers & ~(1u << lane.warp());
  const bool own_warp =
      c.readers >> lane.warp() & 1 && c.reader != lane.number && c.read_warp_epoch == current->warps[lane.warp()].epoch;
  if (other_warp || own_warp)
    report("race-write-after-read", line,
           lane.name() + " overwrites " + byte(cell) +
               " that another thread read with no "
               "barrier between");
}

enum class Write { store, copy_begins, copy_lands };

void note_write(uint32_t address, int bytes, const Lane& lane, Line line, Write how) {
  for (uint32_t n = address / 4; n <= (address + bytes - 1) / 4; ++n) {
    Cell& c = current->cells[n];
    if (how != Write::copy_lands) {
      check_write(c, n, lane, line);
      c.readers = 0, c.reader = -1;
    }
    c.in_flight = how == Write::copy_begins;
    c.written = c.written || how != Write::copy_begins;
    c.write_epoch = current->epoch, c.write_warp_epoch = current->warps[lane.warp()].epoch, c.writer = lane.number;
  }
}

}  // namespace

bool fits_shared(uint32_t address, int bytes, const Lane& lane, Line line, const char* what) {
  if (uint64_t(address) + bytes > current->memory.size()) {
    report("shared-out-of-bounds", line,
           lane.name() + ": " + what + " at byte " + std::to_string(address) + " of " +
               std::to_string(current->memory.size()));
    return false;
  }
  if (address % bytes == 0) return true;
  report("misaligned", line, lane.name() + ": " + what + " at byte " + std::to_string(address));
  return false;
}

void note_read(uint32_t address, int bytes, const Lane& lane, Line line) {
  for (uint32_t n = address / 4; n <= (address + bytes - 1) / 4; ++n) {
    Cell& c = current->cells[n];
    if (c.in_flight)
      report("copy-not-waited", line, lane.name() + " reads " + byte(n) + " while a copy into it is in flight");
    else if (!c.written)
      report("shared-never-written", line, lane.name() + " reads " + byte(n));
    else if (unordered_after_write(c, lane))
      report("race-read-after-write", line,
             lane.name() + " reads " + byte(n) + " written by thread " + std::to_string(c.writer) +
                 " with no barrier between");
    if (c.read_epoch != current->epoch) c.read_epoch = current->epoch, c.readers = 0, c.reader = -1;
    c.readers |= 1u << lane.warp();
    c.reader = c.reader == -1 || c.reader == lane.number ? lane.number : -2;
    c.read_warp_epoch = current->warps[lane.warp()].epoch;
  }
}

void read_shared(uint32_t address, void* to, int bytes, Line line) {
  const Lane& me = *current->now;
  std::memset(to, 0xff, bytes);
  if (!fits_shared(address, bytes, me, line, "load")) return;
  note_read(address, bytes, me, line);
  std::memcpy(to, &current->memory[address], bytes);
}
void write_shared(uint32_t address, const void* from, int bytes, Line line) {
  const Lane& me = *current->now;
  if (!fits_shared(address, bytes, me, line, "store")) return;
  note_write(address, bytes, me, line, Write::store);
  std::memcpy(&current->memory[address], from, bytes);
}

void copy16(uint32_t to, const void* from, bool valid, Line line) {
  Lane& me = *current->now;
  if (!fits_shared(to, 16, me, line, "copy")) return;
  if (valid) {
    if (reinterpret_cast<uintptr_t>(from) % 16) report("misaligned", line, me.name() + ": source of a copy");
    valid = check_global(from, 16, Global::read, line);
  }
  note_write(to, 16, me, line, Write::copy_begins);
  std::memset(&current->memory[to], 0xff, 16);  // NaN until it lands
  me.open.push_back({to, from, valid, line});
  if (!options().late_copies) {  // the bytes are there; that they may be read is known only after the wait
    if (valid)
      std::memcpy(&current->memory[to], from, 16);
    else
      std::memset(&current->memory[to], 0, 16);
  }
}
void commit_copies() {
  Lane& me = *current->now;
  me.committed.insert(me.committed.end(), me.open.begin(), me.open.end());
  me.open.clear();
}
void wait_for_copies() {
  Lane& me = *current->now;
  for (const Copy& copy : me.committed) {
    if (copy.valid)
      std::memcpy(&current->memory[copy.to], copy.from, 16);
    else
      std::memset(&current->memory[copy.to], 0, 16);
    note_write(copy.to, 16, me, copy.line, Write::copy_lands);
  }
  me.committed.clear();
}

void watch(const std::string& name, const void* data, size_t bytes, size_t element, Access access) {
  for (const Region& r : regions())
    if (r.data == data && r.bytes == bytes) return;
  const bool tracked = access != Access::read;
  regions().push_back({name, static_cast<const char*>(data), bytes, element, access,
                       std::vector<uint64_t>(tracked ? bytes / element : 0)});
}
bool is_watched(const void* data) {
  return std::any_of(regions().begin(), regions().end(), [&](const Region& r) { return r.data == data; });
}
void end_watch() {
  for (const Region& r : regions()) {
    const auto missing = std::count(r.writer.begin(), r.writer.end(), uint64_t(0));
    if (r.access == Access::write && missing > 0)
      report("never-written", Line::current(), r.name + ": " + std::to_string(missing) + " elements");
  }
  regions().clear();
}

bool check_global(const void* p, int bytes, Global how, Line line) {
  const Lane& me = *current->now;
  if (how == Global::read) ++counters().loads;
  bool readable = false;
  for (Region& r : regions()) {
    if (!r.holds(p, bytes)) continue;
    if (r.access == Access::read) {  // another view of the same memory may be writable
      readable = true;
      continue;
    }
    const size_t first = (static_cast<const char*>(p) - r.data) / r.element;
    const uint64_t mine = how == Global::atomic ? kAtomic : current->launch << 32 | uint64_t(current->number + 1);
    for (size_t n = first; n < first + std::max<size_t>(bytes / r.element, 1); ++n) {
      uint64_t& writer = r.writer[n];
      if (how == Global::read && writer == 0 && r.access == Access::write)
        report("global-never-written", line, me.name() + " reads " + r.name);
      const bool same_launch = writer != 0 && writer != kAtomic && writer >> 32 == mine >> 32;
      if (how != Global::atomic && same_launch && writer != mine)
        report("global-race", line, r.name + ": two blocks of one launch at element " + std::to_string(n));
      if (how != Global::read) writer = mine;
    }
    return true;
  }
  if (!readable)
    report("global-out-of-bounds", line,
           me.name() + (how == Global::read ? " reads" : " writes") + " outside every tensor");
  else if (how != Global::read)
    report("write-to-input", line, me.name() + " writes what is only to be read");
  return readable && how == Global::read;
}

void count_passes(const uint32_t (&addresses)[32], uint32_t lanes, int bytes) {
  const int words = std::max(1, bytes / 4), per_pass = 32 / words;
  for (int first = 0; first < 32; first += per_pass) {
    std::vector<uint32_t> banks[32];
    size_t most = 0;
    for (int lane = first; lane < first + per_pass; ++lane)
      for (int k = 0; k < words && lanes >> lane & 1; ++k) {
        const uint32_t word = addresses[lane] / 4 + k;
        auto& bank = banks[word % 32];
        if (std::find(bank.begin(), bank.end(), word) == bank.end()) bank.push_back(word);
        most = std::max(most, bank.size());
      }
    counters().passes += most, counters().fewest_passes += most > 0;
  }
}

Sectors::~Sectors() {
  std::sort(addresses_, addresses_ + count_);
  uint64_t past = 0, past_sector = 0, bytes = 0, sectors = 0;  // the first byte and sector after those counted
  for (int n = 0; n < count_; ++n) {
    const uint64_t first = addresses_[n], end = first + bytes_, sector = first / 32, end_sector = (end + 31) / 32;
    bytes += end - std::max(first, std::min(past, end));
    sectors += end_sector - std::max(sector, std::min(past_sector, end_sector));
    past = end, past_sector = end_sector;
  }
  counters().sectors += sectors, counters().fewest_sectors += (bytes + 31) / 32;
}

}  // namespace gpu_model
