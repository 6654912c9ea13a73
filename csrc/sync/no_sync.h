#pragma once

#include <utility>

namespace trireme {

// While it lives, what `synchronize` stands for only accumulates gradients on this rank.
class NoSync {
 public:
  explicit NoSync(bool& synchronize)
      : synchronize_(synchronize), before_(std::exchange(synchronize, false)) {}
  ~NoSync() { synchronize_ = before_; }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  bool& synchronize_;
  bool before_;
};

}  // namespace trireme
