#pragma once

#include <trireme/shm/rank_block.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace trireme::shm {

// The shared part of a byte ring; the bytes follow it. Positions count all bytes that ever passed.
struct ByteRingBlock {
  alignas(kCacheLine) std::atomic<uint64_t> written{0};   // the writer counts
  alignas(kCacheLine) std::atomic<uint64_t> consumed{0};  // the reader counts
  std::atomic<bool> mapped{false};                        // the reader has mapped the ring
  // The number of the last message that the reader could not use, stored before `consumed` goes on,
  // and what it expected, stored before that number.
  std::atomic<uint64_t> refused{0};
  std::atomic<int64_t> expected_bytes{0};
  std::atomic<uint32_t> expected_dtype{0};

  std::byte* bytes() { return reinterpret_cast<std::byte*>(this + 1); }
};

// Sends bytes from one process to another, in order. The reader may read written bytes after
// publish(), and their room is free again after the reader's release(). One thread at a time on
// either side; never blocks. `capacity` is a multiple of a cache line, the same on both sides.
class RingWriter {
 public:
  RingWriter() = default;
  RingWriter(ByteRingBlock& block, int64_t capacity) : block_(&block), capacity_(capacity) {}

  int64_t room() const {
    return capacity_ -
           static_cast<int64_t>(position_ - block_->consumed.load(std::memory_order_seq_cst));
  }
  // Returns whether the reader has written an impossible position. (The padding of a message may
  // lie behind the room.)
  bool is_torn() const { return room() > capacity_ || room() <= -int64_t{kCacheLine}; }
  // Writes at most room() bytes.
  void write(const std::byte* from, int64_t bytes);
  void pad_to_line() { position_ = (position_ + kCacheLine - 1) / kCacheLine * kCacheLine; }
  void publish() { block_->written.store(position_, std::memory_order_seq_cst); }

  bool was_refused(uint64_t message) const {
    return block_->refused.load(std::memory_order_seq_cst) == message;
  }
  int64_t expected_bytes() const { return block_->expected_bytes.load(std::memory_order_relaxed); }
  uint32_t expected_dtype() const { return block_->expected_dtype.load(std::memory_order_relaxed); }

  // Returns whether bytes are unread, and stay so because the reader has not mapped the ring.
  bool is_unfetched() const {
    return position_ != block_->consumed.load(std::memory_order_seq_cst) &&
           !block_->mapped.load(std::memory_order_seq_cst);
  }

 private:
  ByteRingBlock* block_ = nullptr;
  int64_t capacity_ = 0;
  uint64_t position_ = 0;
};

class RingReader {
 public:
  RingReader() = default;
  RingReader(ByteRingBlock& block, int64_t capacity) : block_(&block), capacity_(capacity) {
    block.mapped.store(true, std::memory_order_seq_cst);
  }
  explicit operator bool() const { return block_ != nullptr; }

  int64_t available() const {
    return static_cast<int64_t>(block_->written.load(std::memory_order_seq_cst) - position_);
  }
  // Returns whether the writer has written an impossible position.
  bool is_torn() const { return available() < 0 || available() >= capacity_ + int64_t{kCacheLine}; }
  // Reads at most available() bytes; a null `to` drops them.
  void read(std::byte* to, int64_t bytes);
  void skip_to_line() { position_ = (position_ + kCacheLine - 1) / kCacheLine * kCacheLine; }
  void release() { block_->consumed.store(position_, std::memory_order_seq_cst); }
  void refuse(uint64_t message, int64_t expected_bytes, uint32_t expected_dtype) {
    block_->expected_bytes.store(expected_bytes, std::memory_order_relaxed);
    block_->expected_dtype.store(expected_dtype, std::memory_order_relaxed);
    block_->refused.store(message, std::memory_order_seq_cst);
  }

 private:
  ByteRingBlock* block_ = nullptr;
  int64_t capacity_ = 0;
  uint64_t position_ = 0;
};

}  // namespace trireme::shm
