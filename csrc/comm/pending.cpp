#include <trireme/comm/pending.h>

#include <thread>

namespace trireme {

bool Pending::comes_within(Clock::duration patience) const {
  const auto end = Clock::now() + patience;
  while (!done()) {
    if (Clock::now() >= end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

}  // namespace trireme
