// Products of pairs whose rows end where memory does: the sanitizers do not see what a matrix unit reads.
#include <sys/mman.h>
#include <unistd.h>
#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#endif

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kernels/cpu/pairs.h"

namespace attention_ops {
namespace {

constexpr Index kWidth = kPairVectors * kLanes<float>;

// Memory of whole pages with one after them that nothing may touch.
BFloat16* end_of_pages(Index bytes) {
  const Index page = sysconf(_SC_PAGESIZE), size = round_up(bytes, page);
  void* memory = mmap(nullptr, size_t(size + page), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  char* end = static_cast<char*>(memory) + size;
  if (memory == MAP_FAILED || mprotect(end, size_t(page), PROT_NONE) != 0) std::abort();
  return reinterpret_cast<BFloat16*>(end);
}

bool agrees(Index rows, Index count) {
  [[maybe_unused]] const MatrixUnit unit;
  BFloat16* const a = end_of_pages(1 << 16) - rows * count;
  BFloat16* const b = end_of_pages(1 << 16) - count * kWidth;
  for (Index n = 0; n < rows * count; ++n) a[n] = BFloat16::from(float(n % 7) - 3);
  for (Index n = 0; n < count * kWidth; ++n) b[n] = BFloat16::from(float(n % 5) - 2);
  std::vector<float> out(size_t(rows * kWidth), 1.0f);
  multiply_pairs<true>(out.data(), kWidth, {a, count}, {b, 2 * kWidth}, rows, kPairVectors, count);
  for (Index r = 0; r < rows; ++r)
    for (Index c = 0; c < kWidth; ++c) {
      float sum = 1;
      for (Index n = 0; n < count; ++n) sum += a[r * count + n] * b[n / 2 * 2 * kWidth + 2 * c + n % 2];
      if (out[size_t(r * kWidth + c)] != sum) return false;
    }
  return true;
}

}  // namespace
}  // namespace attention_ops

int main() {
#if defined(__AMX_TILE__)
  if (syscall(SYS_arch_prctl, 0x1023, 18)) return std::puts("the kernel refuses the matrix unit"), 0;
#endif
  using namespace attention_ops;
  int wrong = 0;
  for (const Index rows : {0, 1, 2, 5})
    for (const Index depths : {1, 2, 3}) wrong += !agrees(rows * kPairRows, depths * kPairDepth);
  std::printf("products of pairs, %d-byte vectors: %d wrong\n", kVectorBytes, wrong);
  return wrong != 0;
}
