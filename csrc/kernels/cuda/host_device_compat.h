#pragma once

// Marks what runs on the GPU when nvcc compiles it, and on the host in the tests, which any
// compiler compiles.
#if defined(__CUDACC__)
#define TRIREME_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TRIREME_HOST_DEVICE [[gnu::always_inline]] inline
#endif
