#include <trireme/activation/offload_file.h>

#include <trireme/common/error.h>
#include <trireme/common/fork_guard.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <sys/types.h>
#include <unistd.h>
#include <unordered_map>
#include <utility>

// See [Note: files of offloaded memory] in offload_file.h.

namespace trireme {
namespace {

size_t whole_pages(size_t bytes) {
  static const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

[[noreturn]] void refuse_to_offload(const std::string& folder, size_t bytes, int error) {
  struct statvfs disk{};
  const std::string free =
      ::statvfs(folder.c_str(), &disk) == 0
          ? c10::str(", which has ", uint64_t{disk.f_bavail} * disk.f_frsize, " bytes free")
          : "";
  C10_THROW_ERROR(
      Error, error_text("checkpoint",
                        c10::str("cannot offload ", bytes, " bytes to a file in '", folder, "'",
                                 free, ": ", std::strerror(error)),
                        {}, "Make room there, pass another folder, or recompute in place of it."));
}

int open_nameless(const std::string& folder) {
  const int file = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return file;
  // This file system cannot make unnamed files.
  std::string name = folder + "/.trireme_offload_XXXXXX";
  const int named = ::mkostemp(name.data(), O_CLOEXEC);
  if (named >= 0) ::unlink(name.c_str());
  return named;
}

class OffloadFile {
 public:
  OffloadFile(int file, std::byte* begin, size_t capacity)
      : file_(file), begin_(begin), capacity_(capacity) {}
  ~OffloadFile() {
    close();
    ::munmap(begin_, capacity_);
  }
  OffloadFile(const OffloadFile&) = delete;
  OffloadFile& operator=(const OffloadFile&) = delete;

  static std::shared_ptr<OffloadFile> make(const std::string& folder, size_t bytes) {
    const size_t capacity = std::max(kOffloadFileBytes, whole_pages(bytes));
    const int file = open_nameless(folder);
    void* begin = MAP_FAILED;
    if (file >= 0) {
      begin =
          ::mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file, 0);
    }
    if (begin == MAP_FAILED) {
      const int error = errno;
      if (file >= 0) ::close(file);
      refuse_to_offload(folder, bytes, error);
    }
    return std::make_shared<OffloadFile>(file, static_cast<std::byte*>(begin), capacity);
  }

  // Returns whether a piece fits; false in a forked child, which must not append here.
  bool has_room(size_t bytes) const {
    return bytes <= capacity_ - used_ && !fork_guard_.in_child();
  }

  // Returns the mapped address of the bytes; nullptr on failure, with the reason in `errno`.
  std::byte* append(const void* data, size_t bytes) {
    const auto* const from = static_cast<const std::byte*>(data);
    for (size_t done = 0; done < bytes;) {
      const ssize_t count =
          ::pwrite(file_, from + done, bytes - done, static_cast<off_t>(used_ + done));
      if (count > 0) {
        done += static_cast<size_t>(count);
      } else if (count == 0) {
        errno = ENOSPC;
        return nullptr;
      } else if (errno != EINTR) {
        return nullptr;
      }
    }
    return begin_ + std::exchange(used_, used_ + whole_pages(bytes));
  }

  // Ends appending; the pieces written so far stay mapped.
  void close() {
    if (file_ >= 0) ::close(std::exchange(file_, -1));
  }

 private:
  int file_;
  std::byte* begin_;
  size_t capacity_;
  size_t used_ = 0;
  ForkGuard fork_guard_;
};

}  // namespace

c10::Storage write_offloaded(const std::string& folder, const void* data, size_t bytes) {
  // Only the storages of pieces own a file, so this thread refers to its latest file weakly.
  thread_local std::unordered_map<std::string, std::weak_ptr<OffloadFile>> latest;
  std::weak_ptr<OffloadFile>& known = latest[folder];
  std::shared_ptr<OffloadFile> file = known.lock();
  if (!file || !file->has_room(bytes)) {
    if (file) file->close();
    known = file = OffloadFile::make(folder, bytes);
  }
  std::byte* const begin = file->append(data, bytes);
  if (begin == nullptr) refuse_to_offload(folder, bytes, errno);
  c10::DataPtr memory(
      begin, new std::shared_ptr<OffloadFile>(std::move(file)),
      [](void* holder) { delete static_cast<std::shared_ptr<OffloadFile>*>(holder); },
      c10::Device(c10::kCPU));
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(memory));
}

void read_ahead(const c10::Storage& written) {
  ::madvise(written.mutable_data(), written.nbytes(), MADV_WILLNEED);
}

}  // namespace trireme
