#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace trireme {

// Says how far a rank has come in a sequence of operations to which all ranks of a group come in
// one order, and in which of them it waits for longer than usual. Thread-safe.
class Progress {
 public:
  struct Stuck {
    int64_t number = 0;
    std::string what;
  };

  // Returns the number of the operation that begins; the first one is number 1.
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

// Is in scope while a rank waits; tells the progress when that takes long.
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
