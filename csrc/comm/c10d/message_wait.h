#pragma once

#include <trireme/comm/c10d/connection_watch.h>
#include <trireme/comm/group_health.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

namespace trireme {

// The name of an awaited message, and the rank at its other end.
struct AwaitedMessage {
  std::string operation;
  int64_t peer = 0;
};

// Waits for messages in CPU memory. Engines cannot wait for them in slices, as wait_for_work() does
// for collectives: Gloo closes its connections when such a wait is over. So this rank waits as long
// as the group's timeout says, and a thread, which the first wait starts, looks meanwhile at peers'
// announcements and at the connection, and ends the wait if it is in vain.
class MessageWait {
 public:
  using Clock = std::chrono::steady_clock;

  // `connections` is null for another engine than Gloo.
  MessageWait(std::shared_ptr<GroupHealth> health, std::shared_ptr<ConnectionWatch> connections)
      : health_(std::move(health)), connections_(std::move(connections)) {}
  ~MessageWait();
  MessageWait(const MessageWait&) = delete;
  MessageWait& operator=(const MessageWait&) = delete;

  // Waits until `deadline`, or over another engine than Gloo to the end. Returns whether the
  // message is through; if not, it may be waited for again. Throws c10::DistBackendError naming the
  // operation. One thread at a time.
  bool wait_until(c10d::Work& work, const AwaitedMessage& message, Clock::time_point deadline);

 private:
  class Watched;
  void watch();
  bool is_over(uint64_t wait) const { return ending_ || wait != wait_ || work_ == nullptr; }
  std::string why_in_vain(int64_t peer) const;

  std::shared_ptr<GroupHealth> health_;
  std::shared_ptr<ConnectionWatch> connections_;
  std::mutex mutex_;
  std::condition_variable changed_;
  c10d::Work* work_ = nullptr;  // the Work that is waited for
  int64_t peer_ = 0;
  Clock::time_point deadline_;
  Clock::time_point next_look_;
  c10d::Work* given_up_ = nullptr;  // the Work whose wait has come to its deadline
  std::string why_;                 // the watch has ended the wait
  uint64_t wait_ = 0;               // counts waits
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace trireme
