// Marks what the processor and the graphics card compute by the same source. Means nothing to a C++ compiler.
#pragma once

#if defined(__CUDACC__)
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif
