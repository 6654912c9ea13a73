#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/comm/tensor_channel.h>
#include <trireme/common/export.h>

#include <cstdint>
#include <memory>

namespace trireme {

// [Note: ranks that are threads]
//
// Threads of one process are ranks of a group, too: rows of a pipeline are. They share all memory,
// so a message is a reference, and a collective is done by the last thread that comes, under one
// lock. No thread can vanish, and none is waited for by a clock: one that leaves the common
// sequence announces its failure, which ends the waits of all others. They may not have begun what
// it has left: so it is not for them to recover, but for whoever runs them, between two runs.
//
// What is sent shares its memory and its version with what the sender holds: who works in place on
// it is noticed by the backward that needs it, as within one thread.

// Is a group whose ranks are threads of this process. It is made once, and each thread asks for its
// communicator, by which it calls the verbs. Dense tensors on the CPU only.
class TRIREME_API ThreadGroup {
 public:
  explicit ThreadGroup(int64_t ranks);
  ~ThreadGroup();
  ThreadGroup(const ThreadGroup&) = delete;
  ThreadGroup& operator=(const ThreadGroup&) = delete;

  // Verbs return when they are done. It keeps what it needs of the group alive.
  std::shared_ptr<Communicator> communicator(int64_t rank);

  // Forgets failures. To be called while no thread uses a communicator.
  void recover();

  class State;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace trireme
