#pragma once

#include <trireme/common/export.h>
#include <trireme/common/fork_guard.h>
#include <trireme/shm/mailbox.h>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace trireme::shm {

// Moves the messages of a mailbox: a thread that waits for one does it (a hand-over to another
// thread costs more than a small message), and while none waits, a thread that the first transfer
// to be left pending starts. That thread takes over within a millisecond; it costs nothing while no
// transfer is pending.
//
// Thread-safe. In a forked child only the destructor may be called.
class TRIREME_API Courier {
 public:
  explicit Courier(HostGroup& group);
  ~Courier();  // close()
  Courier(const Courier&) = delete;
  Courier& operator=(const Courier&) = delete;

  // Moves as much of it as can be moved at once. Throws Fault if it was not posted; later errors
  // are in the transfer.
  void post(const TransferPtr& transfer);
  // Waits until the transfer is done; returns false if `until` comes before. May throw an
  // Interruption (interruption.h): the transfer goes on.
  bool wait(const Transfer& transfer, std::optional<Clock::time_point> until = {});
  // Moves all that can be moved now, of any transfer.
  void poll();

  // Ends recvs with Fault(kAborted), and waits until sends are done and the peers see the messages
  // sent to them, so that this process may end; but no longer than kLinger: it may end because it
  // failed, and the peers must hear of that. From then on post() throws, and the host group may go.
  void close();
  static constexpr std::chrono::seconds kLinger{5};

 private:
  template <typename Enough, typename IsOver = FutexWait::NeverOver>
  void drive(const Enough& enough, const IsOver& is_over = {});
  bool advance();
  void withdraw(Transfer::Kind kind, const char* why);
  void deliver(const std::vector<TransferPtr>& ended);
  void call_worker();
  void work();

  HostGroup& group_;
  Futex& futex_;  // this rank's futex
  std::chrono::microseconds patience_;
  ForkGuard fork_guard_;

  std::mutex mutex_;  // guards all that follows
  Mailbox mailbox_;
  Clock::time_point next_look_{};
  int64_t drivers_ = 0;  // threads in wait()
  bool closing_ = false;
  bool closed_ = false;
  bool worker_sleeps_ = false;  // until it is woken
  std::unique_ptr<std::condition_variable> changed_ = std::make_unique<std::condition_variable>();
  std::thread worker_;
};

}  // namespace trireme::shm
