#pragma once

#include <c10/core/DeviceGuard.h>

#include <array>
#include <atomic>

namespace trireme {

// The answers to a question about devices of one type, each asked once (by several threads at first
// perhaps), with the device current.
class OncePerDevice {
 public:
  // Returns the answer of `ask()`: the reason against, which lives for ever, or nullptr. `device`
  // has a number.
  template <typename Question>
  const char* why_not(c10::Device device, Question ask) {
    std::atomic<const char*>& answer = answers_[static_cast<size_t>(device.index())];
    const char* known = answer.load(std::memory_order_acquire);
    if (known == nullptr) {
      const c10::DeviceGuard guard(device);
      known = ask();
      if (known == nullptr) known = kNothing;
      answer.store(known, std::memory_order_release);
    }
    return known == kNothing ? nullptr : known;
  }

 private:
  static constexpr char kNothing[] = "";
  std::array<std::atomic<const char*>, 128> answers_{};  // room for all that a DeviceIndex counts
};

}  // namespace trireme
