#pragma once

#include <trireme/common/export.h>

#include <chrono>
#include <string>
#include <utility>

namespace trireme {

// Is derived from by an exception that is no failure of what the thread waits for: it came from
// elsewhere and ends the wait. Such a rank has abandoned what it was at, and tells its peers.
struct TRIREME_API Interruption {
  explicit Interruption(std::string reason) : reason(std::move(reason)) {}
  Interruption(const Interruption&) = default;
  Interruption& operator=(const Interruption&) = delete;
  virtual ~Interruption();

  std::string reason;  // "KeyboardInterrupt came from a signal handler": for the peers
};

// How often threads that wait look around.
inline constexpr std::chrono::milliseconds kLookAround{50};

// Sets what threads do while they wait for other ranks, without any lock, every kLookAround: a
// language whose signal handlers run between its own instructions only (Python) lets them run here.
// `check` may throw, but only what derives from Interruption. One for the process, never unset.
TRIREME_API void set_interruption_check(void (*check)()) noexcept;

// Calls it, if there is one.
TRIREME_API void check_interruption();

}  // namespace trireme
