#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <functional>
#include <optional>
#include <utility>
#include <vector>

namespace trireme {

// Orders copies between a device and the CPU's memory, which run beside what the device computes:
// what one stream hands to another, and what streams hand to the CPU. On CPU, which has no streams,
// work is done at once and there is nothing to wait for.
//
// One thread at a time.
class TRIREME_API StreamHandoff {
 public:
  explicit StreamHandoff(c10::Device device) : device_(device) {}

  // Calls `work` with another stream as the current one. What it enqueues comes after what the
  // caller's stream was given so far, and beside what that is given next, until join(). It counts
  // as noted.
  void beside(const std::function<void()>& work);
  // Makes what the caller's current stream is given next come after all that beside() was given.
  void join();

  // Notes what the caller's current stream was given so far, for wait().
  void note();
  // Waits on the CPU until all that was noted is done.
  void wait();

  // Called in beside(): the memory of `tensor` stays until the current stream has done what it was
  // given so far, whoever frees it.
  static void keep(const at::Tensor& tensor);

 private:
  c10::Device device_;
  std::optional<c10::Stream> side_;
  std::optional<c10::Event> begun_;
  std::optional<c10::Event> ended_;
  std::vector<std::pair<c10::Stream, c10::Event>> noted_;  // the last of each stream
};

}  // namespace trireme
