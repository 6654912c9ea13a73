#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

// Is what goes from one rank to another at once. It describes itself: nothing about it was agreed
// before, and the next one may look different.
struct TensorMessage {
  // These are compared with what the receiver expects.
  int64_t step = 0;
  int64_t micro_batch = 0;
  std::string text = {};                 // goes along by value; a channel does not look into it
  std::vector<at::Tensor> tensors = {};  // any dtypes and sizes; an undefined one stays undefined
  // Says of each tensor whether its sender had it with requires_grad. Is read from the tensors by
  // send(); what is received requires none by itself.
  std::vector<bool> requires_grad = {};
};

// Sends messages to one rank, which receives them in this order. One thread at a time.
class TRIREME_API TensorSender {
 public:
  virtual ~TensorSender() = default;

  // Copies a message into the channel: what it holds may be written again when send() returns.
  // Waits while the receiver is not done with as many as the channel has slots. `label` names the
  // message in errors: "2F3". Throws TypeError for a
  // tensor that cannot be sent (sparse, nested, quantized, without memory, on a device that the
  // channel does not reach), and c10::DistBackendError: also where there is no memory for it, or no
  // file, after which the channel goes on.
  virtual void send(const TensorMessage& message, const std::string& label) = 0;
  // Says whether send() would not wait. An engine that cannot tell says yes.
  virtual bool has_room() const { return true; }
  // Says after a send() that found no memory whether there may be some when the receiver is done
  // with what is on its way.
  virtual bool may_find_memory() const { return false; }
  // Says whether what was sent stays when this end goes: over the memory of a host, whether it was
  // received. An engine waits for that, and throws c10::DistBackendError as send() does.
  virtual bool is_drained() { return true; }
};

// Receives what one rank sends. One thread at a time.
class TRIREME_API TensorReceiver {
 public:
  virtual ~TensorReceiver() = default;

  // Returns the next message. Each tensor has memory of its own, aligned to 64 bytes, that may be
  // written, and the sender's strides, if these leave no gap. It is on the CPU if the sender's was,
  // else on this rank's device of that type. Over shared memory it lies where the sender has put
  // it, which is used again when nobody holds a tensor of the message any more: who holds one
  // longer than until done_with_one(), in any thread, keeps its memory and holds nobody up. What is
  // held beside a bounded number of others (shm/slot_channel.h) is copied first. Throws
  // c10::DistBackendError where nothing comes, and where what comes is not of that step and
  // micro-batch; the latter is then dropped.
  virtual TensorMessage receive(int64_t step, int64_t micro_batch, const std::string& label) = 0;
  // Lets the sender send one message more. Called once for each message that was received.
  virtual void done_with_one() = 0;
  // Says whether receive() would find a message; nothing from an engine that cannot tell.
  virtual std::optional<bool> has_message() const { return std::nullopt; }
};

// Asks for a channel between two ranks of a communicator.
struct ChannelRequest {
  int64_t from = 0;
  int64_t to = 0;
  int64_t slots = 1;      // messages that it holds at once, those among them that are in use
  std::string name = {};  // "stage 1 to stage 2"; no two channels have the same one
  // Bounds what an engine has on its way, beside `slots`.
  int64_t most_bytes = INT64_MAX;
  // Says that a rank which goes with a message on its way ends this channel and not the group.
  bool spares_group = false;
  // What takes no more is sent over the memory of a host even where there is none for a slot. Such
  // a channel has no room instead of none for a slot, as long as messages are on their way.
  int64_t reserve_bytes = 0;
};

// Holds a rank's ends of channels. They go when all that was sent has been received: what is on its
// way then may be lost.
class TRIREME_API TensorChannels {
 public:
  virtual ~TensorChannels() = default;

  // Return this rank's end of the channel requests[index]; null where it has none.
  virtual TensorSender* sender(size_t index) = 0;
  virtual TensorReceiver* receiver(size_t index) = 0;

  // Forgets what was sent to this rank in earlier steps and what it was not done with, after
  // Communicator::recover(). Of this rank alone.
  virtual void forget_before(int64_t step) = 0;
};

// Makes channels: through the memory of the host where both ranks share it, else as messages of
// the communicator's engine, over a group of its own for each, which lives as long as the
// communicator. Collective; all ranks request the same. The communicator outlives them. On all
// ranks alike throws ValueError for requests that are none, or differ between ranks, and
// c10::DistBackendError.
TRIREME_API std::unique_ptr<TensorChannels> make_channels(Communicator& communicator,
                                                          std::vector<ChannelRequest> requests);

}  // namespace trireme
