#pragma once

#include <trireme/common/export.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <string_view>

namespace trireme {

namespace shm {
class HostGroup;
}

// Functions for counters in memory that the ranks of a host share, one per rank, which only that
// rank writes: waiting for them is no collective, so ranks may wait in different orders, or not at
// all.

// Wakes peers that wait for a counter. Called after a sequentially consistent store to it.
TRIREME_API void wake_peers(shm::HostGroup& group);

// Waits until the counters of all ranks have reached `target`. `name` is for errors. Throws
// c10::DistBackendError if a rank has died, left a message, or not come before the group's timeout.
using CounterOf = std::function<const std::atomic<uint64_t>&(int64_t rank)>;
TRIREME_API void wait_for_peers(shm::HostGroup& group, const CounterOf& counter_of, uint64_t target,
                                std::string_view name);

}  // namespace trireme
