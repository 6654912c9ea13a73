#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>

namespace trireme {

// Lends blocks of memory of one device that are taken and given back all the time (unsharded
// parameters, gradients on their way), so that they stay the same warm pages. On CPU it keeps up to
// kIdle blocks that nobody uses (at first); other devices have such a pool already, their
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

  // Says where blocks come from, from now on, if not from the device's allocator. A source throws
  // c10::Error where it has none. Blocks that are idle go.
  using Source = std::function<at::DataPtr(int64_t bytes)>;
  void set_source(Source source);

  // Keeps up to so many idle blocks from now on; gives up the others.
  void keep_idle(int64_t blocks);

  // These return the bytes that are taken now, and the most that ever were.
  int64_t taken_bytes() const;
  int64_t most_taken_bytes() const;

 private:
  class Blocks;
  c10::Device device_;
  std::shared_ptr<Blocks> blocks_;
};

}  // namespace trireme
