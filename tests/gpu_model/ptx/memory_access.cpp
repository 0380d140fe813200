// Loads, stores, asynchronous copies and atomics, in each of the spaces. What is shared or global goes through the
// checks of the model.
#include <stdexcept>

#include "ptx/warp.h"

namespace gpu_model::ptx {
namespace {

// The bytes of an access, as many as an instruction can move.
using Bytes = unsigned char[16];

struct Address {
  Space space;
  uint64_t at;
};

// A generic address tells its space.
Address resolve(const Warp& w, const Instruction& in, int lane, int which) {
  const uint64_t at = w.source(in, which)[lane] + in.offset[which];
  if (in.space != Space::generic) return {in.space, at};
  switch (at & kSegments) {
    case kSharedSegment:
      return {Space::shared, at - kSharedSegment};
    case kLocalSegment:
      return {Space::local, at - kLocalSegment};
    case kParameterSegment:
      return {Space::parameters, at - kParameterSegment};
    default:
      return {Space::global, at};
  }
}

bool inside(uint64_t at, int bytes, uint64_t size, const char* kind, const Instruction& in) {
  if (at + bytes <= size && at % bytes == 0) return true;
  report(kind, in.line, "byte " + std::to_string(int64_t(at)) + " of " + std::to_string(size) + " in " + in.text);
  return false;
}
bool may_touch(uint64_t at, int bytes, Global how, const Instruction& in) {
  if (at % bytes) {
    report("misaligned", in.line, current->now->name() + ": global access in " + in.text);
    return false;
  }
  return check_global(reinterpret_cast<const void*>(at), bytes, how, in.line);
}

void read(Warp& w, const Instruction& in, int lane, Address from, int bytes, Bytes& to) {
  std::memset(to, 0xff, sizeof to);
  if (from.space == Space::shared) {
    read_shared(uint32_t(from.at), to, bytes, in.line);
  } else if (from.space == Space::local) {
    if (inside(from.at, bytes, w.program.frame_bytes, "local-out-of-bounds", in))
      std::memcpy(to, w.frame(lane) + from.at, bytes);
  } else if (from.space == Space::parameters) {
    if (inside(from.at, bytes, w.parameters.size(), "parameter-out-of-bounds", in))
      std::memcpy(to, &w.parameters[from.at], bytes);
  } else if (may_touch(from.at, bytes, Global::read, in)) {
    std::memcpy(to, reinterpret_cast<const void*>(from.at), bytes);
  }
}
void write(Warp& w, const Instruction& in, int lane, Address to, int bytes, const Bytes& from) {
  if (to.space == Space::shared) {
    write_shared(uint32_t(to.at), from, bytes, in.line);
  } else if (to.space == Space::local) {
    if (inside(to.at, bytes, w.program.frame_bytes, "local-out-of-bounds", in))
      std::memcpy(w.frame(lane) + to.at, from, bytes);
  } else if (to.space == Space::parameters) {
    report("write-to-parameter", in.line, in.text);
  } else if (may_touch(to.at, bytes, Global::write, in)) {
    std::memcpy(reinterpret_cast<void*>(to.at), from, bytes);
  }
}

uint64_t extended(uint64_t x, const Instruction& in) {
  const int unused = 64 - 8 * in.bytes;
  return in.extends_sign ? uint64_t(int64_t(x << unused) >> unused) : x;
}

// Calls f(lane, address) for the address that is the first source.
template <class F>
void each_address(Warp& w, const Instruction& in, uint32_t lanes, int bytes, F&& f) {
  Sectors sectors(bytes);
  each_lane(lanes, [&](int lane) {
    current->now = &w.lane(lane);
    const Address address = resolve(w, in, lane, 0);
    if (address.space == Space::global) sectors.touch(address.at);
    f(lane, address);
  });
}

// The registers of a result, from the bytes that an address holds.
void load(Warp& w, const Instruction& in, uint32_t lanes) {
  const int total = in.bytes * int(in.to.size());
  each_address(w, in, lanes, total, [&](int lane, Address from) {
    Bytes bytes;
    read(w, in, lane, from, total, bytes);
    for (size_t n = 0; n < in.to.size(); ++n) {
      uint64_t x = 0;
      std::memcpy(&x, bytes + n * in.bytes, in.bytes);
      w.registers[in.to[n]][lane] = extended(x, in);
    }
  });
}
void store(Warp& w, const Instruction& in, uint32_t lanes) {
  const int count = int(in.from.size()) - 1, total = in.bytes * count;
  each_address(w, in, lanes, total, [&](int lane, Address to) {
    Bytes bytes;
    for (int n = 0; n < count; ++n) std::memcpy(bytes + n * in.bytes, &w.source(in, n + 1)[lane], in.bytes);
    write(w, in, lane, to, total, bytes);
  });
}

// To, from, 16, and how many bytes there are: 0 or 16.
void copy_asynchronously(Warp& w, const Instruction& in, uint32_t lanes) {
  Sectors sectors(16);
  each_lane(lanes, [&](int lane) {
    current->now = &w.lane(lane);
    const uint64_t to = w.source(in, 0)[lane] + in.offset[0], from = w.source(in, 1)[lane] + in.offset[1];
    const uint32_t whole = uint32_t(w.source(in, 2)[lane]), bytes = uint32_t(w.source(in, 3)[lane]);
    if (whole != 16 || (bytes != 0 && bytes != 16))
      throw std::runtime_error("a copy of other than 16 bytes: " + in.text);
    if (bytes) sectors.touch(from);
    copy16(uint32_t(to), reinterpret_cast<const void*>(from), bytes == 16, in.line);
  });
}
void commit(Warp& w, const Instruction&, uint32_t lanes) {
  each_lane(lanes, [&](int lane) { current->now = &w.lane(lane), commit_copies(); });
}
void wait(Warp& w, const Instruction& in, uint32_t lanes) {
  if (w.source(in, 0)[0] != 0) throw std::runtime_error("a wait for some of the copies: " + in.text);
  each_lane(lanes, [&](int lane) { current->now = &w.lane(lane), wait_for_copies(); });
}

void atomic_or(Warp& w, const Instruction& in, uint32_t lanes) {
  each_lane(lanes, [&](int lane) {
    current->now = &w.lane(lane);
    const Address place = resolve(w, in, lane, 0);
    uint32_t* p = reinterpret_cast<uint32_t*>(place.at);
    if (place.at % 4 || !check_global(p, 4, Global::atomic, in.line)) return;
    w.registers[in.to[0]][lane] = *p;
    *p |= uint32_t(w.source(in, 1)[lane]);
  });
}

}  // namespace

Execute memory_access(const Opcode& opcode) {
  const std::string& name = opcode.name;
  if (name == "ld" || name.starts_with("ld.")) return load;
  if (name == "st" || name.starts_with("st.")) return store;
  if (name == "cp.async.cg.shared.global") return copy_asynchronously;
  if (name == "cp.async.commit_group") return commit;
  if (name == "cp.async.wait_group") return wait;
  if (name == "atom.global.or" && opcode.types[0] == Type::u32) return atomic_or;
  return nullptr;
}

}  // namespace gpu_model::ptx
