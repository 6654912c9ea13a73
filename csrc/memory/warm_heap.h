#pragma once

#include <trireme/common/export.h>

#include <cstdint>

namespace trireme {

// Lets the heap keep up to about twice `bytes` that were freed, for programs that free and allocate
// blocks of a fraction of that all the time (gradients): else glibc's malloc gives them back to the
// system at every free, and each allocation meets pages that the kernel has to clear first. A
// quarter of a backward was spent so.
//
// One block of `bytes`, at most 32 MiB, is allocated, not touched, and freed: glibc adapts its
// thresholds to the largest block freed so far, as it would to a tensor of that size. Settings of
// the user (MALLOC_TRIM_THRESHOLD_ and others) stay in force. Other allocators are unaffected.
TRIREME_API void keep_heap_warm(int64_t bytes);

}  // namespace trireme
