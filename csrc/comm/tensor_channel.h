#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

// A message from one rank to another. It describes itself: nothing about it was agreed before, and
// the next one may look different.
struct TensorMessage {
  // Compared with the values that the receiver expects.
  int64_t step = 0;
  int64_t micro_batch = 0;
  std::string text = {};                 // goes along by value; a channel does not read it
  std::vector<at::Tensor> tensors = {};  // any dtypes and sizes; an undefined one stays undefined
  // One flag per tensor: whether it requires a gradient on the sender. send() reads it from the
  // tensors; received tensors require none by themselves.
  std::vector<bool> requires_grad = {};
};

// The sending end of a channel to one rank, which receives in this order. One thread at a time.
class TRIREME_API TensorSender {
 public:
  virtual ~TensorSender() = default;

  // Copies a message into the channel: its tensors may be written again when send() returns. Waits
  // while the receiver is not done with as many messages as the channel has slots. `label` names
  // the message in errors: "2F3". Throws TypeError for a tensor that cannot be sent (sparse,
  // nested, quantized, without memory, on a device that the channel does not reach), and
  // c10::DistBackendError: also if there is no memory for it, or no file, after which the channel
  // goes on.
  virtual void send(const TensorMessage& message, const std::string& label) = 0;
  // Returns whether send() would not wait. An engine that cannot tell returns true.
  virtual bool has_room() const { return true; }
  // Returns, after a send() that found no memory, whether there may be some when the receiver is
  // done with the messages on their way.
  virtual bool may_find_memory() const { return false; }
  // Returns whether messages sent survive this end: whether they were received. Waits for that for
  // some milliseconds over Gloo, and over an engine whose messages cannot be waited for in slices
  // to the end; throws c10::DistBackendError there as send() does.
  virtual bool is_drained() { return true; }
};

// The receiving end of a channel from one rank. One thread at a time.
class TRIREME_API TensorReceiver {
 public:
  virtual ~TensorReceiver() = default;

  // Returns the next message. Each tensor has memory of its own, aligned to 64 bytes, that may be
  // written, and the sender's strides, if these leave no gap. It is on the CPU if the sender's was,
  // else on this rank's device of that type. Over shared memory it lies where the sender has put
  // it, and that memory is used again once no tensor of the message lives: a tensor held for longer
  // than until done_with_one(), in any thread, keeps its memory and delays no sender. Beyond a
  // bounded number of held messages (shm/slot_channel.h) further ones are copied first. Throws
  // c10::DistBackendError if no message comes, and if the one that comes is not of that step and
  // micro-batch; the latter is then dropped.
  virtual TensorMessage receive(int64_t step, int64_t micro_batch, const std::string& label) = 0;
  // Lets the sender send one message more. Called once for each message that was received.
  virtual void done_with_one() = 0;
  // Returns whether receive() would find a message; nothing from an engine that cannot tell.
  virtual std::optional<bool> has_message() const { return std::nullopt; }
};

// A request for a channel between two ranks of a communicator.
struct ChannelRequest {
  int64_t from = 0;
  int64_t to = 0;
  int64_t slots = 1;      // messages that it holds at once, those in use included
  std::string name = {};  // "stage 1 to stage 2"; no two channels have the same one
  // The most bytes that an engine has on its way, beside `slots`.
  int64_t most_bytes = INT64_MAX;
  // Whether a rank that goes with a message on its way ends this channel and not the group.
  bool spares_group = false;
  // Messages up to this size are sent over a host's memory even if it has none left for a slot.
  // With messages on their way, such a channel reports no room instead of no memory for a slot.
  int64_t reserve_bytes = 0;
};

// A rank's ends of channels. To be destroyed when all messages were received: messages on their way
// may be lost.
class TRIREME_API TensorChannels {
 public:
  virtual ~TensorChannels() = default;

  // Return this rank's end of the channel requests[index]; null if it has none.
  virtual TensorSender* sender(size_t index) = 0;
  virtual TensorReceiver* receiver(size_t index) = 0;

  // Forgets messages of earlier steps that were sent to this rank, or that it was not done with,
  // after Communicator::recover(). Not collective.
  virtual void forget_before(int64_t step) = 0;
};

}  // namespace trireme
