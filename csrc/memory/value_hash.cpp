#include <trireme/memory/value_hash.h>

#include <trireme/common/resolved.h>

#include <ATen/ATen.h>

#include <array>
#include <bit>
#include <cstddef>
#include <cstring>

namespace trireme {
namespace {

constexpr uint64_t kMultiplier = 0x9e3779b97f4a7c15;
constexpr size_t kWordBytes = sizeof(uint64_t);
constexpr size_t kLanes = 8;  // so that no multiplication waits for the one before

// Gives another result for each word, for a given hash: one word that differs is always found.
uint64_t mix_word(uint64_t hash, uint64_t word) {
  return std::rotl((hash ^ word) * kMultiplier, 29);
}

uint64_t word_at(const std::byte* bytes) {
  uint64_t word = 0;
  std::memcpy(&word, bytes, kWordBytes);
  return word;
}

}  // namespace

uint64_t hash_of_values(const at::Tensor& tensor) {
  const at::Tensor dense = resolved(tensor.detach().cpu()).contiguous();
  return hash_of_bytes(dense.const_data_ptr(), dense.nbytes());
}

uint64_t hash_of_bytes(const void* first, size_t bytes) {
  const auto* data = static_cast<const std::byte*>(first);
  std::array<uint64_t, kLanes> lanes{1, 2, 3, 4};
  size_t done = 0;
  for (; done + kLanes * kWordBytes <= bytes; done += kLanes * kWordBytes) {
    for (size_t lane = 0; lane < kLanes; ++lane)
      lanes[lane] = mix_word(lanes[lane], word_at(data + done + lane * kWordBytes));
  }
  uint64_t hash = bytes;
  for (const uint64_t lane : lanes) hash = mix_word(hash, lane);
  for (; done + kWordBytes <= bytes; done += kWordBytes)
    hash = mix_word(hash, word_at(data + done));
  uint64_t rest = 0;
  if (done < bytes) std::memcpy(&rest, data + done, bytes - done);
  return mix_word(hash, rest);
}

}  // namespace trireme
