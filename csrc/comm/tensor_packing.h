#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/comm/tensor_channel.h>
#include <trireme/common/error.h>
#include <trireme/common/export.h>
#include <trireme/shm/packed_tensors.h>

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace trireme {

inline constexpr const char* kChannelArea = "tensor_channel";  // for errors

// One end of a channel, for messages.
struct ChannelName {
  RankOf where = {};  // this rank
  int64_t peer = 0;
  std::string name = {};

  // Returns "send of 2F3 by channel 'stage 1 to stage 2' to rank 2".
  std::string sending(const std::string& label) const;
  // Returns "receive of 2F3 by channel 'stage 1 to stage 2' from rank 1".
  std::string receiving(const std::string& label) const;
  // Throws c10::DistBackendError unless the message is of the expected step and micro-batch.
  void check_came(const TensorMessage& came, int64_t step, int64_t micro_batch,
                  const std::string& label) const;
};

// Returns why a tensor cannot be sent: "is nested", "has the layout Sparse"; empty if it can,
// unless it is on a device.
TRIREME_API std::string why_not_sent(const at::Tensor& tensor);

// Packs the tensors of a message as a description and payloads: one for those in CPU memory, and
// one for those on a device. It is used again for the next message, so that it allocates little.
class TensorPacking {
 public:
  TensorPacking(ChannelName name, bool reaches_devices)
      : name_(std::move(name)), reaches_devices_(reaches_devices) {}

  // Looks at the tensors. Throws TypeError for one that cannot be sent.
  void plan(const TensorMessage& message, const std::string& label);
  const std::vector<int64_t>& description() const { return packer_.description(); }
  int64_t description_bytes() const {
    return static_cast<int64_t>(description().size() * sizeof(int64_t));
  }
  int64_t payload_bytes() const { return packer_.payload_bytes(); }
  int64_t device_bytes() const { return packer_.device_bytes(); }
  // Returns the device of the tensors that are on one.
  const std::optional<c10::Device>& device() const { return device_; }
  // Copies the tensors into payloads, aligned to 64 bytes.
  void copy_into(std::byte* payload, std::byte* on_device, const TensorMessage& message) const;

 private:
  std::string why_not_sent_here(const at::Tensor& tensor) const;

  ChannelName name_;
  bool reaches_devices_;
  std::optional<c10::Device> device_;
  shm::TensorPacker packer_;
  shm::PackedTensor scratch_;
  std::vector<int64_t> offsets_;
};

// A received payload, and its owner.
struct ArrivedPayload {
  std::byte* memory = nullptr;
  int64_t bytes = 0;
  std::shared_ptr<void> keeps = nullptr;
};

// The received form of a message's tensors.
struct ArrivedTensors {
  std::span<const int64_t> description;
  ArrivedPayload payload = {};
  ArrivedPayload on_device = {};
  c10::Device device = c10::kCPU;
};

// Makes tensors over the payloads. Returns false for an invalid description.
bool unpack_tensors(const ArrivedTensors& came, TensorMessage& message);

}  // namespace trireme
