// Arithmetic, logic and comparisons, lane by lane.
#include <algorithm>
#include <cmath>
#include <limits>

#include "ptx/warp.h"

namespace gpu_model::ptx {
namespace {

using Factory = Execute (*)(const std::vector<Type>&);

// One result of one, two or three sources of type T.
template <class T, auto Op>
void unary(Warp& w, const Instruction& in, uint32_t lanes) {
  const Row& a = w.source(in, 0);
  w.set(in, 0, lanes, [&](int i) { return static_cast<T>(Op(value<T>(a[i]))); });
}
template <class T, auto Op>
void binary(Warp& w, const Instruction& in, uint32_t lanes) {
  const Row &a = w.source(in, 0), &b = w.source(in, 1);
  w.set(in, 0, lanes, [&](int i) { return static_cast<T>(Op(value<T>(a[i]), value<T>(b[i]))); });
}
template <class T, auto Op>
void ternary(Warp& w, const Instruction& in, uint32_t lanes) {
  const Row &a = w.source(in, 0), &b = w.source(in, 1), &c = w.source(in, 2);
  w.set(in, 0, lanes, [&](int i) { return static_cast<T>(Op(value<T>(a[i]), value<T>(b[i]), value<T>(c[i]))); });
}

// Runs Op with as many sources as it takes.
template <class T, auto Op>
Execute with_arity() {
  if constexpr (std::is_invocable_v<decltype(Op), T>)
    return unary<T, Op>;
  else if constexpr (std::is_invocable_v<decltype(Op), T, T>)
    return binary<T, Op>;
  else
    return ternary<T, Op>;
}

// What each operation is defined for. Sums and products of integers wrap, so theirs are unsigned.
template <auto Op>
Execute of_floats(const std::vector<Type>& types) {
  return types[0] == Type::f32 ? with_arity<float, Op>() : types[0] == Type::f64 ? with_arity<double, Op>() : nullptr;
}
template <auto Op>
Execute of_bits(const std::vector<Type>& types) {
  switch (types[0]) {
    case Type::u16:
    case Type::s16:
      return with_arity<uint16_t, Op>();
    case Type::u32:
    case Type::s32:
      return with_arity<uint32_t, Op>();
    case Type::u64:
    case Type::s64:
      return with_arity<uint64_t, Op>();
    default:
      return nullptr;
  }
}
template <auto Op>
Execute of_signed_or_not(const std::vector<Type>& types) {
  switch (types[0]) {
    case Type::s16:
      return with_arity<int16_t, Op>();
    case Type::s32:
      return with_arity<int32_t, Op>();
    case Type::s64:
      return with_arity<int64_t, Op>();
    default:
      return of_bits<Op>(types);
  }
}
template <auto Op>
Execute of_bits_or_floats(const std::vector<Type>& types) {
  const Execute found = of_floats<Op>(types);
  return found ? found : of_bits<Op>(types);
}
template <auto Op>
Execute of_logic(const std::vector<Type>& types) {
  return types[0] == Type::pred ? with_arity<bool, Op>() : of_bits<Op>(types);
}

// A divisor of zero gives all bits set, as NVIDIA's hardware does.
constexpr auto kDivide = [](auto a, decltype(a) b) {
  using T = decltype(a);
  if constexpr (std::is_floating_point_v<T>)
    return a / b;
  else if (b == 0)
    return T(~T(0));
  else if (std::is_signed_v<T> && b == T(~T(0)))
    return T(-uint64_t(a));
  else
    return T(a / b);
};
constexpr auto kRemainder = [](auto a, decltype(a) b) {
  using T = decltype(a);
  return b == 0 ? a : std::is_signed_v<T> && b == T(~T(0)) ? T(0) : T(a % b);
};
// Shifts by the width or more give zero, or the sign.
constexpr auto kLeft = [](auto a, decltype(a) b) {
  return uint32_t(b) >= sizeof a * 8 ? decltype(a)(0) : decltype(a)(uint64_t(a) << uint32_t(b));
};
constexpr auto kRight = [](auto a, decltype(a) b) {
  const uint32_t most = sizeof a * 8 - 1, by = uint32_t(b);
  if constexpr (std::is_signed_v<decltype(a)>)
    return a >> std::min(by, most);
  else
    return by > most ? decltype(a)(0) : decltype(a)(a >> by);
};
constexpr auto kLess = [](auto a, decltype(a) b) { return a < b ? a : b; };
constexpr auto kMore = [](auto a, decltype(a) b) { return a > b ? a : b; };

Execute divide(const std::vector<Type>& types) {
  return of_signed_or_not<kDivide>(types);
}
Execute multiply_wide(const std::vector<Type>& types) {
  const auto widened = []<class T, class Wide>() -> Execute {
    return [](Warp& w, const Instruction& in, uint32_t lanes) {
      const Row &a = w.source(in, 0), &b = w.source(in, 1);
      w.set(in, 0, lanes, [&](int i) { return Wide(value<T>(a[i])) * Wide(value<T>(b[i])); });
    };
  };
  return types[0] == Type::s32   ? widened.operator()<int32_t, int64_t>()
         : types[0] == Type::u32 ? widened.operator()<uint32_t, uint64_t>()
         : types[0] == Type::u16 ? widened.operator()<uint16_t, uint32_t>()
                                 : nullptr;
}

// An order of two numbers, one of which may be NaN.
template <class T, auto Op>
void compare_as(Warp& w, const Instruction& in, uint32_t lanes) {
  const Row &a = w.source(in, 0), &b = w.source(in, 1);
  w.set(in, 0, lanes, [&](int i) { return bool(Op(value<T>(a[i]), value<T>(b[i]))); });
}
template <auto Op>
Execute compare(const std::vector<Type>& types) {
  switch (types[0]) {
    case Type::u16:
      return compare_as<uint16_t, Op>;
    case Type::u32:
      return compare_as<uint32_t, Op>;
    case Type::u64:
      return compare_as<uint64_t, Op>;
    case Type::s16:
      return compare_as<int16_t, Op>;
    case Type::s32:
      return compare_as<int32_t, Op>;
    case Type::s64:
      return compare_as<int64_t, Op>;
    case Type::f32:
      return compare_as<float, Op>;
    case Type::f64:
      return compare_as<double, Op>;
    default:
      return nullptr;
  }
}

Execute select(const std::vector<Type>&) {
  return [](Warp& w, const Instruction& in, uint32_t lanes) {
    const Row &a = w.source(in, 0), &b = w.source(in, 1), &p = w.source(in, 2);
    w.set(in, 0, lanes, [&](int i) { return (p[i] ? a[i] : b[i]) & ~uint64_t(0) >> (64 - 8 * in.bytes); });
  };
}

// Sums and products of 32 bits that leave a carry in the last result, and those that take it, after their sources. The
// reader of instructions adds it to their operands.
template <auto Op>
Execute with_carry(const std::vector<Type>& types) {
  if (types[0] != Type::u32) return nullptr;
  return [](Warp& w, const Instruction& in, uint32_t lanes) {
    each_lane(lanes, [&](int i) {
      uint64_t x[4] = {};
      for (size_t n = 0; n < in.from.size(); ++n) x[n] = w.source(in, int(n))[i];
      for (size_t n = 0; n < in.from.size(); ++n) x[n] = uint32_t(x[n]);
      const uint64_t sum = Op(x[0], x[1], x[2], x[3]);
      w.registers[in.to[0]][i] = uint32_t(sum);
      if (in.to.size() > 1) w.registers[in.to[1]][i] = sum >> 32 & 1;
    });
  };
}

Execute funnel_left(const std::vector<Type>&) {  // only of 32 bits
  return [](Warp& w, const Instruction& in, uint32_t lanes) {
    const Row &a = w.source(in, 0), &b = w.source(in, 1), &c = w.source(in, 2);
    w.set(in, 0, lanes, [&](int i) { return uint32_t(((b[i] << 32 | uint32_t(a[i])) << (c[i] & 31)) >> 32); });
  };
}
uint32_t reversed(uint32_t x) {
  uint32_t y = 0;
  for (int n = 0; n < 32; ++n) y |= (x >> n & 1) << (31 - n);
  return y;
}
// A result of 32 bits from T.
template <class T, auto Op>
Execute to_word(const std::vector<Type>& types) {
  if (bytes_of(types[0]) != sizeof(T)) return nullptr;
  return [](Warp& w, const Instruction& in, uint32_t lanes) {
    const Row& a = w.source(in, 0);
    w.set(in, 0, lanes, [&](int i) { return uint32_t(Op(value<T>(a[i]))); });
  };
}

// A product of 32 bits that is not said to be rounded. The assembler makes one operation of it and of a sum that takes
// it, so what rounding took off, a float too, stands in the upper half of its register; a move leaves it there.
void product(Warp& w, const Instruction& in, uint32_t lanes) {
  const Row &a = w.source(in, 0), &b = w.source(in, 1);
  w.set(in, 0, lanes, [&](int i) {
    const float x = value<float>(a[i]), y = value<float>(b[i]), rounded = x * y, rest = std::fma(x, y, -rounded);
    return bits_of(rounded) | (std::isfinite(rest) ? bits_of(rest) << 32 : 0);
  });
}
// The sum of a product as it was before it was rounded, and another number as it is.
template <bool Negated>
void sum(Warp& w, const Instruction& in, uint32_t lanes) {
  const Row &a = w.source(in, 0), &b = w.source(in, 1);
  w.set(in, 0, lanes, [&](int i) {
    const float x = value<float>(a[i]), y = Negated ? -value<float>(b[i]) : value<float>(b[i]);
    const float rest = value<float>(a[i] >> 32), other = Negated ? -value<float>(b[i] >> 32) : value<float>(b[i] >> 32);
    return rest != 0 || other != 0 ? float((double(x) + y) + (rest != 0 ? rest : other)) : x + y;
  });
}
template <bool Negated>
Execute sum_of(const std::vector<Type>& types) {
  constexpr auto wrapped = [](auto a, decltype(a) b) { return Negated ? a - b : a + b; };
  return types[0] == Type::f32 ? sum<Negated> : of_bits_or_floats<wrapped>(types);
}

float flushed(float x) {
  return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x;
}
constexpr auto kReciprocal = [](auto a) { return 1 / a; };
constexpr auto kExp2Flushed = [](float a) { return flushed(std::exp2(flushed(a))); };

const std::map<std::string, Factory>& table() {
  constexpr auto add = [](auto a, decltype(a) b) { return a + b; };
  constexpr auto multiply = [](auto a, decltype(a) b) { return a * b; };
  constexpr auto fused = [](auto a, decltype(a) b, decltype(a) c) { return std::fma(a, b, c); };
  static const std::map<std::string, Factory> all = {
      {"add", sum_of<false>},
      {"add.rn", of_floats<add>},
      {"sub", sum_of<true>},
      {"mul",
       [](const std::vector<Type>& types) { return types[0] == Type::f32 ? product : of_floats<multiply>(types); }},
      {"mul.rn", of_floats<multiply>},
      {"mul.lo", of_bits<multiply>},
      {"mul.wide", multiply_wide},
      {"mad.lo", of_bits<[](auto a, decltype(a) b, decltype(a) c) { return a * b + c; }>},
      {"fma.rn", of_floats<fused>},
      {"div", divide},
      {"div.rn", of_floats<kDivide>},
      {"rem", of_signed_or_not<kRemainder>},
      {"min", of_signed_or_not<kLess>},
      {"max",
       [](const std::vector<Type>& types) {
         const Execute found = of_floats<[](auto a, decltype(a) b) { return std::fmax(a, b); }>(types);
         return found ? found : of_signed_or_not<kMore>(types);
       }},
      {"neg",
       [](const std::vector<Type>& types) {
         const Execute found = of_floats<[](auto a) { return -a; }>(types);
         return found ? found : of_bits<[](auto a) { return ~a + 1; }>(types);
       }},
      {"abs", of_floats<[](auto a) { return std::fabs(a); }>},
      {"copysign", of_floats<[](auto a, decltype(a) b) { return std::copysign(b, a); }>},
      {"rcp.rn", of_floats<kReciprocal>},
      {"rcp.approx.ftz", of_floats<kReciprocal>},
      {"ex2.approx", of_floats<[](auto a) { return std::exp2(a); }>},
      {"ex2.approx.ftz", [](const std::vector<Type>&) -> Execute { return unary<float, kExp2Flushed>; }},
      {"and", of_logic<[](auto a, decltype(a) b) { return a & b; }>},
      {"or", of_logic<[](auto a, decltype(a) b) { return a | b; }>},
      {"xor", of_logic<[](auto a, decltype(a) b) { return a ^ b; }>},
      {"not",
       [](const std::vector<Type>& types) -> Execute {
         if (types[0] == Type::pred) return unary<bool, [](bool a) { return !a; }>;
         return of_bits<[](auto a) { return ~a; }>(types);
       }},
      {"shl", of_bits<kLeft>},
      {"shr", of_signed_or_not<kRight>},
      {"shf.l.wrap", funnel_left},
      {"brev", to_word<uint32_t, reversed>},
      {"bfind.shiftamt", to_word<uint32_t, [](uint32_t a) { return a ? std::countl_zero(a) : -1; }>},
      {"clz", to_word<uint64_t, [](uint64_t a) { return std::countl_zero(a); }>},
      {"selp", select},
      {"setp.eq", compare<[](auto a, auto b) { return a == b; }>},
      {"setp.ne", compare<[](auto a, auto b) { return a < b || (a > b); }>},
      {"setp.lt", compare<[](auto a, auto b) { return a < b; }>},
      {"setp.le", compare<[](auto a, auto b) { return a <= b; }>},
      {"setp.gt", compare<[](auto a, auto b) { return (a > b); }>},
      {"setp.ge", compare<[](auto a, auto b) { return (a >= b); }>},
      {"setp.equ", compare<[](auto a, auto b) { return !(a < b || a > b); }>},
      {"setp.neu", compare<[](auto a, auto b) { return a != b; }>},
      {"setp.ltu", compare<[](auto a, auto b) { return !(a >= b); }>},
      {"setp.leu", compare<[](auto a, auto b) { return !(a > b); }>},
      {"setp.gtu", compare<[](auto a, auto b) { return !(a <= b); }>},
      {"setp.geu", compare<[](auto a, auto b) { return !(a < b); }>},
      {"setp.nan", compare<[](auto a, auto b) { return a != a || b != b; }>},
      {"add.cc", with_carry<[](auto a, auto b, auto, auto) { return a + b; }>},
      {"addc", with_carry<[](auto a, auto b, auto c, auto) { return a + b + c; }>},
      {"addc.cc", with_carry<[](auto a, auto b, auto c, auto) { return a + b + c; }>},
      {"sub.cc", with_carry<[](auto a, auto b, auto, auto) { return a - b; }>},
      {"subc", with_carry<[](auto a, auto b, auto c, auto) { return a - b - c; }>},
      {"subc.cc", with_carry<[](auto a, auto b, auto c, auto) { return a - b - c; }>},
      {"mul.hi", with_carry<[](auto a, auto b, auto, auto) { return (a * b >> 32); }>},
      {"mad.lo.cc", with_carry<[](auto a, auto b, auto c, auto) { return uint64_t(uint32_t(a * b)) + c; }>},
      {"madc.lo.cc", with_carry<[](auto a, auto b, auto c, auto d) { return uint64_t(uint32_t(a * b)) + c + d; }>},
      {"madc.hi", with_carry<[](auto a, auto b, auto c, auto d) { return (a * b >> 32) + c + d; }>},
      {"madc.hi.cc", with_carry<[](auto a, auto b, auto c, auto d) { return (a * b >> 32) + c + d; }>},
  };
  return all;
}

}  // namespace

Execute arithmetic(const Opcode& opcode) {
  const auto found = table().find(opcode.name);
  return found == table().end() || opcode.types.empty() ? nullptr : found->second(opcode.types);
}

}  // namespace gpu_model::ptx
