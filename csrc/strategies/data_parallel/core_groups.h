#pragma once

#include <trireme/common/export.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <vector>

namespace trireme {

// Returns how many replicas suit this process's CPUs when `threads` may compute: one for each group
// of CPUs in its affinity mask that share a last-level cache, two where there is one group, never
// more than threads; at least 1. Reads small files, once per CPU.
TRIREME_API int64_t default_replicas(int64_t threads);

// Returns how many replicas suit `cpus`, whose caches are listed below `root`; CPUs without a
// listed cache are one group:
//
//   caches {0 1} {2 3}   4 threads   2 replicas        caches {0 1 2 3}   4 threads   2 replicas
//   caches {0 1} {2 3}   1 thread    1 replica         cache {0}          1 thread    1 replica
TRIREME_API int64_t default_replicas(int64_t threads, const std::vector<int>& cpus,
                                     const std::filesystem::path& root);

}  // namespace trireme
