#pragma once

#include <trireme/comm/group_health.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace trireme {

// Waits for messages in CPU memory. Engines cannot wait for them in slices, as wait_for_work() does
// for collectives: Gloo closes its connections when such a wait is over. So this rank waits as long
// as the group's timeout says, and a thread, which the first wait starts, looks meanwhile at peers'
// announcements, and ends the wait if there is one.
class MessageWait {
 public:
  explicit MessageWait(std::shared_ptr<GroupHealth> health) : health_(std::move(health)) {}
  ~MessageWait();
  MessageWait(const MessageWait&) = delete;
  MessageWait& operator=(const MessageWait&) = delete;

  // Throws c10::DistBackendError naming `operation`. One thread at a time.
  void wait(c10d::Work& work, const std::string& operation);

 private:
  class Watched;
  void watch();
  bool is_over(uint64_t wait) const { return ending_ || wait != wait_ || work_ == nullptr; }

  std::shared_ptr<GroupHealth> health_;
  std::mutex mutex_;
  std::condition_variable changed_;
  c10d::Work* work_ = nullptr;  // the Work that is waited for
  uint64_t wait_ = 0;           // counts waits
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace trireme
