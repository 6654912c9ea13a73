#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace trireme::cpu {

// The fewest elements that are worth waking another thread.
inline constexpr int64_t kGrain = 32768;

// Calls body(begin, end) for disjoint ranges that cover [0, numel): on the calling thread if numel
// <= grain, else on the threads of torch's intra-op pool, which hold at least `grain` elements
// each.
void for_ranges(int64_t numel, c10::function_ref<void(int64_t begin, int64_t end)> body,
                int64_t grain = kGrain);

}  // namespace trireme::cpu
