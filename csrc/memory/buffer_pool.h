#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>

namespace trireme {

// A pool of memory blocks of one device that are taken and given back all the time (unsharded
// parameters, gradients on their way), so that they stay the same warm pages. On CPU it keeps up to
// kIdle blocks that are not in use (at first); other devices have such a pool already, their
// allocator, which is asked each time.
//
// Thread-safe. Blocks may outlive the pool.
class TRIREME_API BufferPool {
 public:
  static constexpr int64_t kIdle = 2;

  explicit BufferPool(c10::Device device);
  ~BufferPool();
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  // Returns at least `bytes`, uninitialised, aligned to 64; they are given back when the pointer
  // goes. Throws c10::OutOfMemoryError saying how many bytes `label` needed.
  at::DataPtr take(int64_t bytes, const char* label);
  // Takes memory as a contiguous tensor, whose storage gives it back.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, const char* label);

  // Sets the source of further blocks, in place of the device's allocator. A source throws
  // c10::Error if it has no memory. Idle blocks are freed.
  using Source = std::function<at::DataPtr(int64_t bytes)>;
  void set_source(Source source);

  // Keeps up to that many idle blocks from now on; frees the others.
  void keep_idle(int64_t blocks);

  // Return the bytes that are taken now, and the most that ever were.
  int64_t taken_bytes() const;
  int64_t most_taken_bytes() const;

 private:
  class Blocks;
  c10::Device device_;
  std::shared_ptr<Blocks> blocks_;
};

}  // namespace trireme
