#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace trireme {

// How far a rank is in a sequence of operations that all ranks of a group run in one order, and in
// which of them it waits for longer than usual. Thread-safe.
class Progress {
 public:
  struct Stuck {
    int64_t number = 0;
    std::string what;
  };

  // Returns the number of the operation that begins; the first is number 1.
  int64_t start() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return ++started_;
  }
  int64_t started() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return started_;
  }
  std::optional<Stuck> stuck() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stuck_;
  }
  void set_stuck(std::optional<Stuck> stuck) {
    const std::lock_guard<std::mutex> lock(mutex_);
    stuck_ = std::move(stuck);
  }

 private:
  mutable std::mutex mutex_;
  int64_t started_ = 0;
  std::optional<Stuck> stuck_;
};

// A scope in which a rank waits; takes_long() tells the progress of a long wait.
class WaitInProgress {
 public:
  WaitInProgress(Progress& progress, int64_t number) : progress_(progress), number_(number) {}
  ~WaitInProgress() {
    if (is_long_) progress_.set_stuck({});
  }
  WaitInProgress(const WaitInProgress&) = delete;
  WaitInProgress& operator=(const WaitInProgress&) = delete;

  void takes_long(const std::string& what) {
    if (number_ == 0 || is_long_) return;
    is_long_ = true;
    progress_.set_stuck(Progress::Stuck{number_, what});
  }

 private:
  Progress& progress_;
  int64_t number_;  // 0: not counted
  bool is_long_ = false;
};

}  // namespace trireme
