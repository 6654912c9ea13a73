#pragma once

#include <trireme/common/export.h>

#include <cstddef>
#include <cstdint>

namespace trireme {

// [Note: shared memory in a forked child]
//
// A child of fork() inherits a shared mapping as it is: the processes that map the same file see
// its writes. A PrivateInChildren makes the mapping the child's own while fork() runs: the same
// file at the same address, copied page by page when the child writes. So tensors over it stay
// valid, a fork costs one system call per mapping, and only pages that the child writes take
// memory.
//
// The child does not get a snapshot. A page that it has not written shows later writes to the file,
// as before; for a snapshot, copy in the child, or before the fork. The kernel may refuse the
// mapping (its limits on memory, or a program that closed the file): then the child may only read,
// and a write ends it by a signal instead of reaching the others.
//
// Fork handlers run for fork(), not for vfork() and posix_spawn(), whose children only call exec.

// Returns how often this process has come out of a fork since it began to count: an object that
// remembers the number of its birth sees that it lives in a child, at the cost of one load.
TRIREME_API uint64_t forks_so_far();

// Gives children of fork() [begin, begin + bytes) for themselves while it lives. That is a shared,
// writable mapping of the file `fd` from its beginning on; both belong to the caller, who keeps
// them as long. Thread-safe. See [Note: shared memory in a forked child].
class TRIREME_API PrivateInChildren {
 public:
  PrivateInChildren(void* begin, size_t bytes, int fd);
  ~PrivateInChildren();
  PrivateInChildren(const PrivateInChildren&) = delete;
  PrivateInChildren& operator=(const PrivateInChildren&) = delete;

 private:
  void* begin_;
};

}  // namespace trireme
