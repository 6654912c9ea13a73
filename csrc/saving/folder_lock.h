#pragma once

#include <trireme/common/export.h>

#include <string>
#include <utility>

namespace trireme {

// A lock of a folder that one save has against the saves of other ranks, groups and processes. It
// stays with the folder wherever that is moved. The system takes it away when the process dies.
class TRIREME_API FolderLock {
 public:
  FolderLock() = default;
  FolderLock(FolderLock&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  FolderLock& operator=(FolderLock&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  ~FolderLock();

  // Locks what is no folder, or lies on a file system without locks, not at all. Returns false if
  // somebody else has locked it, or has moved or removed it meanwhile.
  bool take(const std::string& folder);
  bool is_taken() const { return descriptor_ >= 0; }
  // Returns whether the folder that was locked is still there; if none could be locked, whether
  // anything is.
  bool is_at(const std::string& folder) const;

 private:
  int descriptor_ = -1;
};

}  // namespace trireme
