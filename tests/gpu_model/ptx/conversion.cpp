// Moves and conversions between types.
#include <cmath>
#include <limits>

#include "kernels/view.h"
#include "ptx/warp.h"

namespace gpu_model::ptx {
namespace {

// Toward an integer type floats saturate, and NaN becomes 0.
template <class To, class From>
To converted(From x) {
  if constexpr (std::is_integral_v<To> && std::is_floating_point_v<From>) {
    if (x != x) return 0;
    if (x <= From(std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
    if (x >= From(std::numeric_limits<To>::max())) return std::numeric_limits<To>::max();
  }
  return static_cast<To>(x);
}

enum class Rounding { none, nearest, zero };  // to a whole number

template <class To, class From, Rounding R>
void convert(Warp& w, const Instruction& in, uint32_t lanes) {
  const Row& a = w.source(in, 0);
  w.set(in, 0, lanes, [&](int i) {
    From x = value<From>(a[i]);
    if constexpr (R == Rounding::nearest) x = std::nearbyint(x);
    if constexpr (R == Rounding::zero) x = std::trunc(x);
    return converted<To>(x);
  });
}

template <class F>
Execute with_integer(Type type, F&& f) {
  switch (type) {
    case Type::s8:
      return f.template operator()<int8_t>();
    case Type::u16:
      return f.template operator()<uint16_t>();
    case Type::u32:
      return f.template operator()<uint32_t>();
    case Type::u64:
      return f.template operator()<uint64_t>();
    case Type::s16:
      return f.template operator()<int16_t>();
    case Type::s32:
      return f.template operator()<int32_t>();
    case Type::s64:
      return f.template operator()<int64_t>();
    default:
      return nullptr;
  }
}
template <class F>
Execute with_float(Type type, F&& f) {
  return type == Type::f32   ? f.template operator()<float>()
         : type == Type::f64 ? f.template operator()<double>()
                             : nullptr;
}

Execute between_integers(Type to, Type from) {
  return with_integer(to, [from]<class To>() {
    return with_integer(from, []<class From>() -> Execute { return convert<To, From, Rounding::none>; });
  });
}
// To a float, from an integer or another float.
Execute to_float(Type to, Type from) {
  return with_float(to, [from]<class To>() {
    const Execute found = with_float(from, []<class From>() -> Execute { return convert<To, From, Rounding::none>; });
    return found ? found
                 : with_integer(from, []<class From>() -> Execute { return convert<To, From, Rounding::none>; });
  });
}
// Floats to whole numbers, in an integer or in their own type.
template <Rounding R>
Execute to_whole(Type to, Type from) {
  if (to == from) return with_float(to, []<class T>() -> Execute { return convert<T, T, R>; });
  return with_integer(to, [from]<class To>() {
    return with_float(from, []<class From>() -> Execute { return convert<To, From, R>; });
  });
}

// Two floats in one register, the first source in the high half.
template <class E>
void pack_halves(Warp& w, const Instruction& in, uint32_t lanes) {
  const Row &high = w.source(in, 0), &low = w.source(in, 1);
  w.set(in, 0, lanes, [&](int i) {
    return uint32_t(E::from(value<float>(high[i])).bits) << 16 | E::from(value<float>(low[i])).bits;
  });
}

// A register from several, the first lowest, or several from one; `bytes` is of the whole.
void pack(Warp& w, const Instruction& in, uint32_t lanes) {
  const int bits = in.bytes * 8 / int(in.from.size());
  w.set(in, 0, lanes, [&](int i) {
    uint64_t whole = 0;
    for (int n = 0; n < int(in.from.size()); ++n)
      whole |= (w.source(in, n)[i] & (~uint64_t(0) >> (64 - bits))) << (n * bits);
    return whole;
  });
}
void unpack(Warp& w, const Instruction& in, uint32_t lanes) {
  const int bits = in.bytes * 8 / int(in.to.size());
  const Row whole = w.source(in, 0);  // may be a result too
  for (int n = 0; n < int(in.to.size()); ++n)
    w.set(in, n, lanes, [&](int i) { return whole[i] >> (n * bits) & (~uint64_t(0) >> (64 - bits)); });
}

void move(Warp& w, const Instruction& in, uint32_t lanes) {
  if (in.to.size() > 1) return unpack(w, in, lanes);
  if (in.from.size() > 1) return pack(w, in, lanes);
  const Row& a = w.source(in, 0);
  w.set(in, 0, lanes, [&](int i) { return in.bytes == 4 ? uint32_t(a[i]) : a[i]; });
}

// Between an address in a space and a generic one: `segment` is that of the space.
template <uint64_t Segment>
void to_generic(Warp& w, const Instruction& in, uint32_t lanes) {
  const Row& a = w.source(in, 0);
  w.set(in, 0, lanes, [&](int i) { return a[i] + Segment; });
}
template <uint64_t Segment>
void from_generic(Warp& w, const Instruction& in, uint32_t lanes) {
  const Row& a = w.source(in, 0);
  w.set(in, 0, lanes, [&](int i) { return a[i] - Segment; });
}

Execute convert_types(const Opcode& opcode) {
  const Type to = opcode.types[0], from = opcode.types[1];
  if (opcode.name == "cvt" && to == Type::f64) return to_float(to, from);  // exact
  if (opcode.name == "cvt") return between_integers(to, from);
  if (opcode.name == "cvt.rni") return to_whole<Rounding::nearest>(to, from);
  if (opcode.name == "cvt.rzi") return to_whole<Rounding::zero>(to, from);
  if (opcode.name != "cvt.rn" || from == Type::bf16 || from == Type::f16) return nullptr;
  if (to == Type::bf16x2) return pack_halves<attention_ops::BFloat16>;
  if (to == Type::f16x2) return pack_halves<attention_ops::Float16>;
  return to_float(to, from);
}

}  // namespace

Execute conversion(const Opcode& opcode) {
  const std::string& name = opcode.name;
  if (name == "mov") return move;
  if (opcode.types.size() == 2) return convert_types(opcode);
  if (name == "cvta.shared") return to_generic<kSharedSegment>;
  if (name == "cvta.local") return to_generic<kLocalSegment>;
  if (name == "cvta.param") return to_generic<kParameterSegment>;
  if (name == "cvta.to.global") return from_generic<0>;
  if (name == "cvta.to.shared") return from_generic<kSharedSegment>;
  if (name == "cvta.to.local") return from_generic<kLocalSegment>;
  return nullptr;
}

}  // namespace gpu_model::ptx
