#pragma once

#include <trireme/comm/requests.h>
#include <trireme/common/export.h>
#include <trireme/shm/flag_wait.h>
#include <trireme/strategies/remote/wire_messages.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace trireme::remote {

// The outcome of a call that never gets an answer: the callee is gone, or the call was given up.
struct Unanswered {
  std::string why = {};
  bool is_late = false;  // its deadline has passed
};

// One call of this rank. Any thread may read it; one completes it.
class TRIREME_API PendingCall {
 public:
  using Outcome = std::variant<Value, Failure, Unanswered>;

  PendingCall(int64_t to, std::string what, std::optional<std::chrono::milliseconds> timeout);

  int64_t to() const { return to_; }
  // Returns "method act of Observer".
  const std::string& what() const { return what_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  shm::Clock::time_point deadline() const { return deadline_; }

  bool is_done() const { return done_.load(std::memory_order_acquire); }
  // Returns the outcome; called once the call is done.
  const Outcome& outcome() const { return outcome_; }
  void complete(Outcome outcome);
  // Keeps Refs that are sent to the callee until it has answered.
  void keep(std::vector<RefPtr> refs) { refs_ = std::move(refs); }

  static constexpr std::chrono::milliseconds kUsualTimeout = std::chrono::minutes(30);

 private:
  int64_t to_;
  std::string what_;
  std::chrono::milliseconds timeout_;
  shm::Clock::time_point deadline_;
  std::vector<RefPtr> refs_;
  Outcome outcome_;
  std::atomic<bool> done_{false};
};
using PendingCallPtr = std::shared_ptr<PendingCall>;

// The calls of this rank that have no answer yet. Thread-safe.
class TRIREME_API PendingCalls : public OpenRequests<PendingCall> {
 public:
  // Removes and returns the calls whose deadline has passed, with their numbers.
  std::vector<std::pair<int64_t, PendingCallPtr>> take_late(shm::Clock::time_point now);
  // Complete calls as lost: the calls to one rank, or all.
  void lose(int64_t to, const std::string& why);
  void lose_all(const std::string& why);
};

}  // namespace trireme::remote
