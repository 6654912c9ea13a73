#pragma once

#include <cstdint>
#include <string>

namespace trireme {

// Returns ", 12 bytes needed, 5 free" for a file that could not be written; empty if nobody knows
// what is free on its disk.
std::string disk_room(const std::string& path, int64_t needed_bytes);

}  // namespace trireme
