#include <trireme/common/forks.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <vector>

namespace trireme {
namespace {

std::atomic<uint64_t> forks{0};

void count_fork() { forks.fetch_add(1, std::memory_order_relaxed); }

// A mapping and its file, known by numbers that stay when its descriptor is closed and used again.
struct SharedMapping {
  void* begin;
  size_t bytes;
  int fd;
  dev_t device;
  ino_t inode;
};

// Never destroyed: children of a process that is about to end need it, too.
struct SharedMappings {
  std::mutex mutex;
  std::vector<SharedMapping> all;

  static SharedMappings& instance() {
    static auto& mappings = *new SharedMappings;
    return mappings;
  }
};

bool is_open(const SharedMapping& mapping) {
  struct stat found{};
  return ::fstat(mapping.fd, &found) == 0 && found.st_dev == mapping.device &&
         found.st_ino == mapping.inode;
}

// Runs in the child, which has one thread and may not allocate. Reserves no swap: only written
// pages take memory.
void make_private(const SharedMapping& mapping) {
  constexpr int kFlags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
  if (is_open(mapping) && ::mmap(mapping.begin, mapping.bytes, PROT_READ | PROT_WRITE, kFlags,
                                 mapping.fd, 0) != MAP_FAILED)
    return;
  if (::mprotect(mapping.begin, mapping.bytes, PROT_READ) != 0)
    ::munmap(mapping.begin, mapping.bytes);
}

void before_fork() { SharedMappings::instance().mutex.lock(); }

void after_fork_in_parent() { SharedMappings::instance().mutex.unlock(); }

// Mappings that are private already stay so in the child's own children, with the child's writes.
void after_fork_in_child() {
  SharedMappings& mappings = SharedMappings::instance();
  for (const SharedMapping& mapping : mappings.all) make_private(mapping);
  mappings.all.clear();
  mappings.mutex.unlock();
}

}  // namespace

uint64_t forks_so_far() {
  static const int registered = ::pthread_atfork(nullptr, nullptr, count_fork);
  static_cast<void>(registered);
  return forks.load(std::memory_order_relaxed);
}

PrivateInChildren::PrivateInChildren(void* begin, size_t bytes, int fd) : begin_(begin) {
  static const int registered =
      ::pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  static_cast<void>(registered);
  SharedMapping mapping{begin, bytes, fd, 0, 0};
  struct stat found{};
  if (::fstat(fd, &found) == 0) {
    mapping.device = found.st_dev;
    mapping.inode = found.st_ino;
  }
  SharedMappings& mappings = SharedMappings::instance();
  const std::lock_guard<std::mutex> lock(mappings.mutex);
  mappings.all.push_back(mapping);
}

PrivateInChildren::~PrivateInChildren() {
  SharedMappings& mappings = SharedMappings::instance();
  const std::lock_guard<std::mutex> lock(mappings.mutex);
  std::erase_if(mappings.all,
                [this](const SharedMapping& mapping) { return mapping.begin == begin_; });
}

}  // namespace trireme
