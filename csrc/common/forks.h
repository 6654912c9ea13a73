#pragma once

#include <trireme/common/export.h>

#include <cstdint>

namespace trireme {

// How often this process has come out of a fork since it began to count: an object that remembers
// the number of its birth sees that it lives in a child, at the cost of one load.
TRIREME_API uint64_t forks_so_far();

}  // namespace trireme
