#pragma once

#include <trireme/common/export.h>

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <utility>
#include <vector>

namespace trireme {

// What streams of a device were given to do, for the CPU to wait for: copies between the device and
// pinned memory. On CPU, which has no streams, there is nothing to wait for.
//
// One thread at a time.
class TRIREME_API StreamHandoff {
 public:
  explicit StreamHandoff(c10::Device device) : device_(device) {}

  // What the caller's current stream was given so far.
  void note();
  // Until all that was noted is done.
  void wait();

 private:
  c10::Device device_;
  std::vector<std::pair<c10::Stream, c10::Event>> noted_;  // the last of each stream
};

}  // namespace trireme
