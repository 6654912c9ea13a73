#pragma once

#include <trireme/comm/tensor_packing.h>
#include <trireme/shm/slot_channel.h>

#include <memory>
#include <optional>
#include <string>

namespace trireme {

// Sends through the memory of the host; see [Note: slots of a channel].
class ShmTensorSender final : public TensorSender {
 public:
  ShmTensorSender(shm::HostGroup& group, const shm::ChannelEnd& end, ChannelName name,
                  std::shared_ptr<void> keeps);

  void send(const TensorMessage& message, const std::string& label) override;
  bool has_room() const override { return !slots_.is_full(); }
  bool may_find_memory() const override { return slots_.was_refused_for_now(); }
  bool is_drained() override { return slots_.is_drained(); }

 private:
  std::byte* slot_for(int64_t bytes, const std::string& label);

  std::shared_ptr<void> keeps_;
  ChannelName name_;
  TensorPacking packing_;
  shm::SlotSender slots_;
};

class ShmTensorReceiver final : public TensorReceiver {
 public:
  ShmTensorReceiver(shm::HostGroup& group, const shm::ChannelEnd& end, ChannelName name,
                    std::shared_ptr<void> keeps);

  TensorMessage receive(int64_t step, int64_t micro_batch, const std::string& label) override;
  void done_with_one() override { slots_.done_with_one(); }
  std::optional<bool> has_message() const override { return !slots_.is_empty(); }
  void forget_before(int64_t step);

 private:
  std::shared_ptr<void> keeps_;
  ChannelName name_;
  shm::SlotReceiver slots_;
};

}  // namespace trireme
