#pragma once

#include <trireme/comm/host.h>
#include <trireme/comm/tensor_channel.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace trireme {

// [Note: messages in the memory of a host]
//
// A channel has a block of counters in memory that all ranks of the host map, and slots. A slot is
// a segment of its own: its sender makes it when it first needs one, or a larger one, and the
// receiver opens it when a message says where it is. A message is copied once, into its slot, and
// is used there.
//
// Two things say that a slot is free, because users may keep what a stage received:
//
// * The receiver counts the messages that it is done with. The sender waits by this count alone, so
//   a channel never stands still because somebody keeps a tensor.
// * The last tensor that goes writes into the slot that it is free. Where all slots are still taken
//   the sender makes one more: the memory is that which the user keeps.

// Lies in shared memory, for one channel.
struct MemoryChannelBlock;

// Returns the bytes of the block of a channel.
int64_t memory_channel_bytes(const ChannelRequest& request);

// Make one end of a channel over a block, which `memory` holds. `peer` is the other end's rank on
// this host. `group` outlives them, or `communicator` does.
struct MemoryChannelRequest {
  ChannelRequest channel;
  std::shared_ptr<const shm::Segment> memory;
  std::byte* block = nullptr;
  shm::HostGroup* group = nullptr;
  int64_t peer = 0;
};
std::unique_ptr<TensorSender> make_memory_sender(MemoryChannelRequest request);

// Is a receiver that can pass over what was sent in earlier steps.
class ForgetfulReceiver : public TensorReceiver {
 public:
  virtual void forget_before(int64_t step) = 0;
};
std::unique_ptr<ForgetfulReceiver> make_memory_receiver(MemoryChannelRequest request);

}  // namespace trireme
