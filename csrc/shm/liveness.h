#pragma once

#include <trireme/common/export.h>

#include <string>
#include <sys/types.h>

namespace trireme::shm {

// Says whether another process still runs, for as long as this object lives: a number that the
// kernel gives to a later process does not count. This process (ranks as threads) always does.
// Thread-safe after construction.
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

 private:
  pid_t pid_ = 0;
  int fd_ = -1;  // a pidfd; where the kernel has none, the start time stands in
  std::string started_at_;
};

// Says whether that process has ended: there is none of that number, or only what is left of it
// until its parent has asked. A process may go at any moment, so that a file below /proc/<pid> may
// fail to open, or to be read once it is open; who meets such an error asks this.
TRIREME_API bool has_ended(pid_t pid);

// Names the namespace in which this process's pid means something; equal texts for peers that can
// watch each other.
TRIREME_API std::string pid_namespace();

}  // namespace trireme::shm
