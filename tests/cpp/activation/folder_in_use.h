#pragma once

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <system_error>

namespace trireme::test {

// Whether this process has a file of the folder open or mapped.
inline bool is_in_use(const std::string& folder) {
  std::ifstream maps("/proc/self/maps");
  const std::string mapped((std::istreambuf_iterator<char>(maps)), {});
  if (mapped.find(folder) != std::string::npos) return true;
  for (const auto& file : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;  // the iterator's own, too, is among them
    const auto name = std::filesystem::read_symlink(file.path(), gone);
    if (name.string().find(folder) != std::string::npos) return true;
  }
  return false;
}

}  // namespace trireme::test
