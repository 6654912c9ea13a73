#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/comm/tensor_channel.h>
#include <trireme/common/export.h>

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace trireme {

// [Note: ranks that are threads]
//
// Threads of one process are ranks of a group, too: rows of a pipeline are. They share all memory,
// so a message is a reference, and a collective is done by the last thread that comes, under one
// lock. No thread can vanish, and none is waited for by a clock: one that leaves the common
// sequence announces its failure, which ends the waits of all others. They may not have begun the
// work that it has left, so recovering is up to the caller that runs them, between two runs.
//
// A message shares its memory and its version with the sender's tensor: a change in place is
// noticed by the backward that needs the tensor, as within one thread.
//
// Ranks may have devices of their own. Then a tensor on the sender's device comes to the
// receiver's, by a copy that the sender enqueues: in the order of the current streams of both
// devices, which the threads must have in common. No thread waits for it.

// A group whose ranks are threads of this process. It is made once, and each thread asks for its
// communicator, by which it calls the verbs. Collectives take dense tensors on the CPU only.
class TRIREME_API ThreadGroup {
 public:
  // `devices`: one for each rank; if empty, the CPU for all.
  explicit ThreadGroup(int64_t ranks, std::vector<c10::Device> devices = {});
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
