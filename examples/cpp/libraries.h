// Loads the operators: libraries that register themselves with torch, and export nothing else.
#pragma once
#include <dlfcn.h>

#include <stdexcept>

// `paths` are those of libattention_ops.so and of the kernels of one instruction set, libattention_ops_avx2.so or
// another that the processor has; for a GPU, libattention_ops_cuda.so too.
inline void load_operators(int count, char** paths) {
  for (int i = 0; i < count; ++i)
    if (!dlopen(paths[i], RTLD_NOW)) throw std::runtime_error(dlerror());
}
