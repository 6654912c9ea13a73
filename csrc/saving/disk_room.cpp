#include <trireme/saving/disk_room.h>

#include <sys/statvfs.h>

namespace trireme {

std::string disk_room(const std::string& path, int64_t needed_bytes) {
  struct statvfs found{};
  if (::statvfs(path.c_str(), &found) != 0) return "";
  const auto free_bytes = static_cast<uint64_t>(found.f_bavail) * found.f_frsize;
  return ", " + std::to_string(needed_bytes) + " bytes needed, " + std::to_string(free_bytes) +
         " free";
}

}  // namespace trireme
