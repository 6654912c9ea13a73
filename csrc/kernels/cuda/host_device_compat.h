#pragma once

// Marks functions that run on the GPU when nvcc compiles them, and on the host in the tests, which
// any compiler compiles.
#if defined(__CUDACC__)
#define TRIREME_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TRIREME_HOST_DEVICE [[gnu::always_inline]] inline
#endif
