#pragma once

#include <chrono>

namespace trireme {

// A timer that adds the milliseconds for which it lives to a sum.
class Timed {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Timed(double& sum) : sum_(sum), begin_(Clock::now()) {}
  ~Timed() { sum_ += since(begin_); }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

  // Returns milliseconds.
  static double since(Clock::time_point begin) {
    return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
  }

 private:
  double& sum_;
  Clock::time_point begin_;
};

}  // namespace trireme
