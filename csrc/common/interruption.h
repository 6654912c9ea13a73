#pragma once

#include <trireme/common/export.h>

#include <chrono>
#include <string>
#include <utility>

namespace trireme {

// The base of exceptions that are no failure of the awaited operation: they came from elsewhere and
// end the wait. Such a rank has abandoned its operation, and tells its peers.
struct TRIREME_API Interruption {
  explicit Interruption(std::string reason) : reason(std::move(reason)) {}
  Interruption(const Interruption&) = default;
  Interruption& operator=(const Interruption&) = delete;
  virtual ~Interruption();

  std::string reason;  // "KeyboardInterrupt came from a signal handler": for the peers
};

// How often waiting threads look around.
inline constexpr std::chrono::milliseconds kLookAround{50};

// Sets the function that threads waiting for other ranks call, without any lock, every kLookAround:
// a language whose signal handlers run between its own instructions only (Python) lets them run
// here. `check` may throw only types derived from Interruption. One per process, never unset.
TRIREME_API void set_interruption_check(void (*check)()) noexcept;

// Calls that function, if there is one.
TRIREME_API void check_interruption();

}  // namespace trireme
