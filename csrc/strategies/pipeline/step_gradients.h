#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace trireme {

// Divides what a step adds to .grad, and not what was there before it: that is set aside until the
// step ends, and is there again after a step that failed.
class StepGradients {
 public:
  // Sets aside what .grad of `parameters` holds. One that is named twice counts once.
  void begin(const std::vector<at::Tensor>& parameters);
  // Divides what the step made, and adds it to what was there, which stays the same tensor.
  void end(int64_t divisor);
  // Drops what the step made.
  void abandon();

 private:
  struct Held {
    at::Tensor parameter;
    at::Tensor before;
  };
  std::vector<Held> held_;
};

}  // namespace trireme
