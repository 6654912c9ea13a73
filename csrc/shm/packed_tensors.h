#pragma once

#include <trireme/common/export.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace trireme::shm {

// A tensor and its place in the payload of a message. A tensor with elements is dense: its strides
// leave no gap.
struct PackedTensor {
  bool is_defined = false;
  bool requires_grad = false;
  bool is_on_device = false;  // lies in the payload of a device
  uint8_t dtype = 0;          // torch's number
  uint8_t element_bytes = 0;
  int64_t offset = 0;
  std::vector<int64_t> sizes{};
  std::vector<int64_t> strides{};
};

// Describes a list of tensors for the receiver of the payload, in numbers of 64 bits.
class TRIREME_API TensorPacker {
 public:
  void clear();
  // Gives the tensor the next place in its payload, aligned to 64 bytes, and returns its offset.
  int64_t add(const PackedTensor& tensor);
  const std::vector<int64_t>& description() const { return words_; }
  int64_t payload_bytes() const { return payload_bytes_; }
  int64_t device_bytes() const { return device_bytes_; }

 private:
  std::vector<int64_t> words_;
  int64_t payload_bytes_ = 0;
  int64_t device_bytes_ = 0;
};

// Reads a description; nothing if no packer has written it for payloads of that many bytes. Every
// element of every tensor that it returns lies in its payload.
TRIREME_API std::optional<std::vector<PackedTensor>> unpack(std::span<const int64_t> description,
                                                            int64_t payload_bytes,
                                                            int64_t device_bytes = 0);

}  // namespace trireme::shm
