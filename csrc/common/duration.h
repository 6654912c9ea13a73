#pragma once

#include <algorithm>
#include <chrono>

namespace trireme {

// The longest wait: a hundred years, which added to the time of any clock still is a time.
constexpr std::chrono::milliseconds kLongestWait = std::chrono::hours(24) * 36525;

// Returns how long a caller means to wait, kLongestWait at most. Python's durations come here by
// way of a 64-bit count of microseconds, beyond which they turn negative: one that far below zero
// was meant to be longer than any. Other times below zero stay as they are.
constexpr std::chrono::milliseconds saturated(std::chrono::milliseconds duration) {
  return duration < -kLongestWait ? kLongestWait : std::min(duration, kLongestWait);
}

// Returns when a wait of that length, which begins now, ends.
inline std::chrono::steady_clock::time_point deadline_after(std::chrono::milliseconds duration) {
  return std::chrono::steady_clock::now() + saturated(duration);
}

}  // namespace trireme
