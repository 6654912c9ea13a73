#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace trireme {

// Tells the core that a loop only waits for memory: on x86 it frees the sibling thread's ports, on
// Arm it is a hint.
inline void spin_pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

}  // namespace trireme
