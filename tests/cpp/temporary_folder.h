#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

namespace trireme::test {

// Made anew, and gone with all that is in it.
struct TemporaryFolder {
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "trireme_XXXXXX").string();
    path = mkdtemp(pattern.data());
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  std::string at(const std::string& name) const { return path + "/" + name; }

  std::string path;
};

}  // namespace trireme::test
