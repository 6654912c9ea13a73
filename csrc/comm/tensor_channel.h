#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
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
  std::vector<at::Tensor> tensors = {};  // of any dtype and sizes; an undefined one stays undefined
  // Says of each tensor whether its sender had it with requires_grad. Is read from the tensors by
  // send().
  std::vector<bool> requires_grad = {};
};

// Sends messages to one rank, which receives them in this order. One thread at a time.
class TRIREME_API TensorSender {
 public:
  virtual ~TensorSender() = default;

  // Copies a message into the channel: what it holds may be written again when send() returns.
  // Waits while the receiver has as many that it is not done with as the channel has slots. `label`
  // names it in errors: "2F3". Throws c10::DistBackendError.
  virtual void send(const TensorMessage& message, const std::string& label) = 0;
};

// Receives what one rank sends. One thread at a time.
class TRIREME_API TensorReceiver {
 public:
  virtual ~TensorReceiver() = default;

  // Returns the next message. Its tensors are dense and have the sender's strides, if these are
  // dense, too. Over shared memory they lie where the sender has put them, and may be written; who
  // holds one longer than until done_with_one() keeps its memory. Throws c10::DistBackendError
  // where nothing comes, and where what comes is not of that step and micro-batch.
  virtual TensorMessage receive(int64_t step, int64_t micro_batch, const std::string& label) = 0;
  // Lets the sender send one message more. Called once for each message that was received.
  virtual void done_with_one() = 0;
};

// Asks for a channel between two ranks of a communicator.
struct ChannelRequest {
  int64_t from = 0;
  int64_t to = 0;
  int64_t slots = 1;      // messages that it holds at once, those among them that are in use
  std::string name = {};  // "stage 1 to stage 2"; no two channels have the same one
};

// Holds a rank's ends of channels.
class TRIREME_API TensorChannels {
 public:
  virtual ~TensorChannels() = default;

  // Return this rank's end of the channel requests[index]; null where it has none.
  virtual TensorSender* sender(size_t index) = 0;
  virtual TensorReceiver* receiver(size_t index) = 0;

  // Forgets what was sent in earlier steps, after Communicator::recover(). Of this rank alone.
  virtual void forget_before(int64_t step) = 0;
};

// Makes channels: through the memory of the host where both ranks share it, else as messages of
// the communicator's engine. Collective; all ranks request the same. The communicator outlives
// them. Throws ValueError for requests that are none, or differ between ranks.
TRIREME_API std::unique_ptr<TensorChannels> make_channels(Communicator& communicator,
                                                          std::vector<ChannelRequest> requests);

}  // namespace trireme
