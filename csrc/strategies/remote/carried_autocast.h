#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/remote/value.h>

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <vector>

namespace trireme::remote {

// Returns what autocast says in this thread, as it travels: None where it is off, else whether
// casts are cached, and device type and dtype of each device where it is on.
TRIREME_API Value present_autocast();

// Autocast as it is in a caller's thread, as long as this lives. Threads that serve calls have
// none.
class TRIREME_API CarriedAutocast {
 public:
  // Throws c10::ValueError for what present_autocast() does not return.
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
  bool caches_ = false;  // this one keeps casts
  bool is_on_ = false;
};

}  // namespace trireme::remote
