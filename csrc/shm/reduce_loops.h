#pragma once

#include <trireme/shm/reduce.h>

#include <cstdint>
#include <span>
#include <string_view>

namespace trireme::shm {

// The functions of reduce.h for one instruction set. Requests are not checked.
struct ReduceLoops {
  std::string_view isa;
  void (*reduce)(void* dst, void* second, const ReduceRequest& request, bool stream_second);
  void (*copy_streaming)(void* dst, const void* src, int64_t bytes);
};

// Returns the loops that this processor can run, the fastest last; exported for the tests, which
// run each of them.
TRIREME_API std::span<const ReduceLoops> supported_reduce_loops();

}  // namespace trireme::shm
