#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/remote/value.h>

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <vector>

namespace trireme::remote {

// Returns this thread's autocast state as a value: None if it is off, else whether casts are
// cached, and the device type and dtype of each device for which it is on.
TRIREME_API Value present_autocast();

// A guard that sets the autocast state of a caller's thread. Threads that serve calls have none.
class TRIREME_API CarriedAutocast {
 public:
  // Throws c10::ValueError for a value that present_autocast() cannot return.
  explicit CarriedAutocast(const Value& carried);
  ~CarriedAutocast();
  CarriedAutocast(const CarriedAutocast&) = delete;
  CarriedAutocast& operator=(const CarriedAutocast&) = delete;

 private:
  struct State {
    c10::DeviceType device;
    bool is_enabled;
    at::ScalarType dtype;
  };
  std::vector<State> before_;
  bool cached_before_ = true;
  bool caches_ = false;  // this guard keeps casts
  bool is_on_ = false;
};

}  // namespace trireme::remote
