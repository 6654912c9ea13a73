#pragma once

#include <trireme/comm/tensor_channel.h>

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace trireme {

// Says what a message is made of: which tensors lie where behind this head.
struct MessageHead {
  struct Entry {
    std::optional<c10::ScalarType> dtype = {};  // of an undefined tensor: none
    bool requires_grad = false;
    std::vector<int64_t> sizes = {};
    std::vector<int64_t> strides = {};  // dense
    int64_t offset = 0;                 // bytes, from the beginning of the payload
    int64_t bytes = 0;
  };

  int64_t step = 0;
  int64_t micro_batch = 0;
  std::string text = {};
  std::vector<Entry> entries = {};
  int64_t payload_bytes = 0;

  // Returns what describes a message. Throws TypeError for a tensor that no message can hold.
  static MessageHead of(const TensorMessage& message);

  // Writes it as bytes, as many as head_bytes() says, and reads it. Every number that is read is
  // checked: c10::DistBackendError says that the bytes are no head.
  int64_t head_bytes() const;
  void write(std::span<std::byte> to) const;
  static MessageHead read(std::span<const std::byte> from);

  // Copies the tensors of the message that this describes to their places.
  void pack(const TensorMessage& message, std::byte* payload) const;
  // Returns the message over the memory of a payload; `release` is called when the last of its
  // tensors is gone, or now if there is none.
  TensorMessage unpack(std::byte* payload, const std::function<void()>& release) &&;
};

// Throws c10::DistBackendError unless a message is of that step and micro-batch.
void check_message(const MessageHead& head, int64_t step, int64_t micro_batch,
                   const std::string& channel, RankOf where);

}  // namespace trireme
