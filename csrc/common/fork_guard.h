#pragma once

#include <trireme/common/forks.h>

#include <cstdint>

namespace trireme {

// The process that made an object, so that the object knows when it lives in a forked child, where
// none of its threads are, and whose memory is a copy. A copy of it is of the same process.
class ForkGuard {
 public:
  bool in_child() const { return forks_ != forks_so_far(); }

 private:
  uint64_t forks_ = forks_so_far();
};

}  // namespace trireme
