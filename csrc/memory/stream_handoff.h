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

// Orders copies between a device and the CPU's memory, which run beside the device's computations:
// between two streams, and between streams and the CPU. On CPU, which has no streams, work is done
// at once and there is nothing to wait for.
//
// One thread at a time.
class TRIREME_API StreamHandoff {
 public:
  explicit StreamHandoff(c10::Device device) : device_(device) {}

  // Calls `work` with another stream as the current one. Its work comes after all earlier work of
  // the caller's stream, and runs beside that stream's later work, until join(). It counts as
  // noted.
  void beside(const std::function<void()>& work);
  // Makes later work of the caller's current stream wait for all work of beside().
  void join();

  // Notes the work of the caller's current stream so far, for wait().
  void note();
  // Waits on the CPU until all noted work is done.
  void wait();

  // Called in beside(): keeps the memory of `tensor`, even if it is freed, until the current stream
  // has done its work so far.
  static void keep(const at::Tensor& tensor);

 private:
  c10::Device device_;
  std::optional<c10::Stream> side_;
  std::optional<c10::Event> begun_;
  std::optional<c10::Event> ended_;
  std::vector<std::pair<c10::Stream, c10::Event>> noted_;  // the last of each stream
};

}  // namespace trireme
