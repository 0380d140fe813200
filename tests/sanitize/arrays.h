// Random numbers in memory of exactly their own size, so that a step past it is seen.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <random>

#include "kernels/view.h"

namespace attention_ops {

inline std::mt19937 generator(1);

inline Index draw(Index least, Index most) {
  return std::uniform_int_distribution<Index>(least, most)(generator);
}

template <class E>
using Array = std::shared_ptr<E[]>;

template <class E>
Array<E> array_of(Index count) {
  return Array<E>(new E[count]());
}
// Matrix units read memory behind the sanitizer's back: what they read ends with its page, and the next is forbidden.
template <>
inline Array<BFloat16> array_of(Index count) {
  const size_t page = sysconf(_SC_PAGESIZE), bytes = count * sizeof(BFloat16), whole = round_up(bytes, page);
  char* memory =
      static_cast<char*>(mmap(nullptr, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  mprotect(memory + whole, page, PROT_NONE);
  return Array<BFloat16>(reinterpret_cast<BFloat16*>(memory + whole - bytes),
                         [=](BFloat16*) { munmap(memory, whole + page); });
}
template <class E>
Array<E> normal(Index count) {
  Array<E> x = array_of<E>(count);
  std::normal_distribution<double> draw;
  for (Index i = 0; i < count; ++i) x[i] = convert<E>(draw(generator));
  return x;
}

}  // namespace attention_ops
