// What kernels may ask of the device: the only file with PTX and launches. tests/gpu_model has its twin of the same
// names, under which the same kernels run on the processor with every access checked.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "kernels/view.h"

#define DEVICE __device__ __forceinline__
// For what is long: called, not copied to its callers. What it is given by reference lies in local memory, so a
// function of numbers copies them first, and it makes its own SimtMemory, whose places it then knows to be shared.
#define DEVICE_APART inline __device__ __noinline__

namespace attention_ops::device {

// Sixteen bytes that move as one.
struct alignas(16) Chunk {
  uint32_t word[4];
};

// --- the place of a thread ---
DEVICE int thread() {
  return int(threadIdx.x);
}
DEVICE Index block() {
  return blockIdx.x;
}
DEVICE Index blocks() {
  return gridDim.x;
}

// --- barriers, and exchange within a warp ---
DEVICE void sync_threads() {
  __syncthreads();
}
DEVICE void sync_warp() {
  __syncwarp();
}
template <class V>
DEVICE V shuffle_xor(V x, int mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}
DEVICE uint32_t ballot(bool x) {
  return __ballot_sync(0xffffffffu, x);
}
DEVICE int first_bit(uint32_t bits) {
  return __ffs(int(bits)) - 1;
}

// --- memory ---
// Addresses in a tile are found by flipping bits within a row, of 512 bytes at most.
extern __shared__ __align__(512) unsigned char shared_memory[];

template <class E>
struct Shared {
  E* data;
  DEVICE E& operator[](int i) const { return data[i]; }
};
// The block's shared memory from a byte on.
template <class E>
DEVICE Shared<E> shared(int first_byte) {
  return {reinterpret_cast<E*>(shared_memory + first_byte)};
}
DEVICE uint32_t shared_address(int first_byte) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory + first_byte));
}

template <class E>
DEVICE E load(const E* p) {
  return *p;
}
template <class E>
DEVICE void store(E* p, E x) {
  *p = x;
}
// Spelled out: given a plain store of sixteen bytes, the compiler may split it into four.
DEVICE void store16(void* p, Chunk x) {
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(x.word[0]), "r"(x.word[1]), "r"(x.word[2]),
               "r"(x.word[3])
               : "memory");
}
// Any number of blocks may raise a flag.
DEVICE void raise(int* flag) {
  atomicOr(flag, 1);
}

DEVICE void store_shared(uint32_t address, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
DEVICE Chunk load_shared16(uint32_t address) {
  Chunk x;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
               : "r"(address)
               : "memory");
  return x;
}

// --- asynchronous copies of sixteen bytes into shared memory; an invalid source writes zeros ---
DEVICE void copy16(uint32_t to, const void* from, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
DEVICE void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group 0;" ::: "memory");
}

// --- tensor cores ---
template <bool Transposed>
DEVICE void load_matrices(uint32_t (&r)[4], uint32_t address) {
  if constexpr (Transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// d [16 x 8] += a [16 x 16] b [16 x 8], elements of E, sums in float32
template <class E>
DEVICE void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<E, BFloat16>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats as two elements of E, the first in the low half.
template <class E>
DEVICE uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<E, BFloat16>) {
    const __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&x);
  } else {
    const __half2 x = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&x);
  }
}

// --- arithmetic ---
DEVICE float exp2(float x) {
  return ::exp2f(x);
}
DEVICE_APART double exp2(double x) {
  return ::exp2(x);
}
DEVICE float log2(float x) {
  return ::log2f(x);
}
DEVICE_APART double log2(double x) {
  return ::log2(x);
}
DEVICE float tanh(float x) {
  return ::tanhf(x);
}
DEVICE_APART double tanh(double x) {
  return ::tanh(x);
}
DEVICE double sin(double x) {
  return ::sin(x);
}
DEVICE double cos(double x) {
  return ::cos(x);
}
// a * b, rounded, and not made one operation with a sum that takes it.
DEVICE float multiply(float a, float b) {
  return __fmul_rn(a, b);
}
DEVICE double multiply(double a, double b) {
  return __dmul_rn(a, b);
}
// a * b + c, rounded once.
DEVICE float fma(float a, float b, float c) {
  return ::fmaf(a, b, c);
}
DEVICE double fma(double a, double b, double c) {
  return ::fma(a, b, c);
}
// Good to two units of the last place, and 0 below the normal numbers.
DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// --- launches ---
inline int shared_memory_limit() {
  int device = 0, bytes = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return bytes;
}

template <class... Parameters>
void launch(void (*kernel)(Parameters...), Index blocks, int threads, int shared_bytes, cudaStream_t stream,
            const std::type_identity_t<Parameters>&... parameters) {
  const auto check = [](cudaError_t error) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // or whoever asks next would be told of it again
    throw std::runtime_error("attention_ops: expected a CUDA kernel to start, got " +
                             std::string(cudaGetErrorString(error)));
  };
  if (blocks <= 0) return;
  if (shared_bytes > 48 * 1024)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  // Plain kernels walk over their tasks in steps of the grid, so that any number of them will do.
  const unsigned grid = static_cast<unsigned>(std::min<Index>(blocks, 0x7fffffff));
  kernel<<<grid, threads, shared_bytes, stream>>>(parameters...);
  check(cudaGetLastError());
}

}  // namespace attention_ops::device
