#pragma once

#include <trireme/common/export.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <sys/types.h>

namespace trireme::shm {

// Another process, watched for as long as this object lives: a number that the kernel gives to a
// later process does not count. This process (ranks as threads) is always alive. Thread-safe after
// construction.
class TRIREME_API PeerProcess {
 public:
  PeerProcess() = default;
  // Throws Fault(kNotPossible) if the kernel shows no such process here.
  explicit PeerProcess(pid_t pid);
  PeerProcess(PeerProcess&& other) noexcept;
  PeerProcess& operator=(PeerProcess&& other) noexcept;
  ~PeerProcess();

  pid_t pid() const { return pid_; }
  bool alive() const;
  // Returns "running", "stopped", "sleeping", ... as /proc says; "gone".
  std::string state() const;
  // Returns what wait() would tell the parent of a process that has ended. Other processes learn it
  // from Linux 6.15 on, or, as processes of the same user, until the parent has asked; empty if the
  // kernel does not tell.
  std::optional<int> wait_status() const;

 private:
  pid_t pid_ = 0;
  int fd_ = -1;  // a pidfd; where the kernel has none, the start time stands in
  std::string started_at_;
  mutable std::atomic<int> wait_status_{kUnknown};  // kept: the kernel may forget it
  static constexpr int kUnknown = -1;
};

// Returns how many processes of this machine the kernel has killed for want of memory since it
// started; empty if it does not count them.
TRIREME_API std::optional<int64_t> out_of_memory_kills();

// Returns ": it was killed by SIGKILL", ": it ended with exit code 3", and the likely reason, by
// how many processes the kernel had killed for want of memory before; nothing without a status.
TRIREME_API std::string text_of_end(std::optional<int> wait_status,
                                    std::optional<int64_t> kills_before);
inline bool is_sigkill(int wait_status) { return (wait_status & 0x7f) == 9; }

// Returns when that process began, to tell it from a later one of that number; empty without one.
TRIREME_API std::string start_of(pid_t pid);

// Names this start of this machine; equal texts for processes that one kernel runs.
TRIREME_API std::string host_boot();

// Names the namespace in which this process's pid is valid; equal texts for peers that can watch
// each other.
TRIREME_API std::string pid_namespace();

}  // namespace trireme::shm
