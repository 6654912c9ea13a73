#include <trireme/common/forks.h>

#include <atomic>
#include <pthread.h>

namespace trireme {
namespace {

std::atomic<uint64_t> forks{0};

void count_fork() { forks.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

uint64_t forks_so_far() {
  static const int registered = ::pthread_atfork(nullptr, nullptr, count_fork);
  static_cast<void>(registered);
  return forks.load(std::memory_order_relaxed);
}

}  // namespace trireme
