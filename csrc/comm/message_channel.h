#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/comm/tensor_packing.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace trireme {

// [Note: channels over engines]
//
// Each channel has a group of its own two ranks, so that no order between channels exists. A
// message is a head of fixed size; other data in CPU memory follow in the head or, if they do not
// fit, in one message more. Tensors on a device follow in one message from device to device. On the
// CPU the receiver posts the recv of the next head ahead, so that an engine which wants the recv
// before the send (Gloo) need not wait; elsewhere that recv would hold up a stream of the device.

// Sends to rank 1 of a communicator of two. At most `slots` sends are in flight, and at most one
// beyond `most_bytes`.
class EngineTensorSender final : public TensorSender {
 public:
  EngineTensorSender(std::shared_ptr<Communicator> pair, ChannelName name, int64_t slots,
                     int64_t most_bytes);

  void send(const TensorMessage& message, const std::string& label) override;
  bool is_drained() override;

 private:
  std::shared_ptr<Communicator> pair_;
  ChannelName name_;
  TensorPacking packing_;
  size_t slots_;
  int64_t most_bytes_;
  bool wait_for_first(std::chrono::milliseconds patience);

  struct InFlight {
    std::vector<Pending> parts;
    int64_t bytes;
  };
  std::deque<InFlight> in_flight_;
  int64_t bytes_in_flight_ = 0;
};

// Receives from rank 0 of a communicator of two.
class EngineTensorReceiver final : public TensorReceiver {
 public:
  EngineTensorReceiver(std::shared_ptr<Communicator> pair, ChannelName name);

  TensorMessage receive(int64_t step, int64_t micro_batch, const std::string& label) override;
  void done_with_one() override {}  // a send ends when it is received
  // Drops messages of earlier steps when they come.
  void forget_before(int64_t step) { first_step_ = step; }

 private:
  TensorMessage next(const std::string& label);
  void post_head();

  std::shared_ptr<Communicator> pair_;
  ChannelName name_;
  at::Tensor head_;
  Pending posted_;
  int64_t first_step_ = INT64_MIN;
};

}  // namespace trireme
