#pragma once

#include <chrono>

namespace trireme {

// A timer that adds the milliseconds for which it lives to a sum.
class ScopedTimer {
 public:
  using Clock = std::chrono::steady_clock;

  explicit ScopedTimer(double& sum) : sum_(sum), begin_(Clock::now()) {}
  ~ScopedTimer() { sum_ += since(begin_); }
  ScopedTimer(const ScopedTimer&) = delete;
  ScopedTimer& operator=(const ScopedTimer&) = delete;

  // Returns milliseconds.
  static double since(Clock::time_point begin) {
    return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
  }

 private:
  double& sum_;
  Clock::time_point begin_;
};

}  // namespace trireme
