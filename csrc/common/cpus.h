#pragma once

#include <trireme/common/export.h>

#include <cstdint>
#include <filesystem>

namespace trireme {

// Returns how many CPUs this process may keep busy: those of its affinity mask, but no more than
// the CPU quota of its control group (v1 or v2) and of the groups above it, rounded down; at least
// 1. Reads a few files below `root`, whose absence means no quota.
TRIREME_API int64_t usable_cpus(const std::filesystem::path& root = "/");

}  // namespace trireme
