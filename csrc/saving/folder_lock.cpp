#include <trireme/saving/folder_lock.h>

#include <cerrno>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

namespace trireme {

FolderLock::~FolderLock() {
  if (descriptor_ < 0) return;
  ::flock(descriptor_, LOCK_UN);  // a forked child may have the descriptor, too
  ::close(descriptor_);
}

bool FolderLock::take(const std::string& folder) {
  FolderLock lock;
  lock.descriptor_ = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (lock.descriptor_ < 0) return true;
  if (::flock(lock.descriptor_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    ::close(std::exchange(lock.descriptor_, -1));
    return false;
  }
  if (!lock.is_at(folder)) return false;
  *this = std::move(lock);
  return true;
}

bool FolderLock::is_at(const std::string& folder) const {
  struct stat there{};
  struct stat own{};
  if (::lstat(folder.c_str(), &there) != 0) return false;
  if (descriptor_ < 0) return true;
  return ::fstat(descriptor_, &own) == 0 && own.st_dev == there.st_dev &&
         own.st_ino == there.st_ino;
}

}  // namespace trireme
