#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace trireme {

// Adds a gradient to a total, in place where that is possible; either may be undefined. A dense and
// a sparse one make a dense sum. The gradient stays as it is.
at::Tensor sum_of(at::Tensor total, const at::Tensor& gradient);

// Divides what a step adds to .grad, and not what was there before it: that is set aside until the
// step ends, and is restored after a step that failed.
class StepGradients {
 public:
  // Sets aside what .grad of `parameters` holds. One that is named twice counts once.
  void begin(const std::vector<at::Tensor>& parameters);
  // Divides what the step made for some of them, and adds a copy of what was set aside, now
  // already. Parameters that begin() was not told of are left alone.
  void add_earlier(const std::vector<at::Tensor>& parameters, int64_t divisor);
  // Marks .grad of these parameters as complete.
  void set_whole(const std::vector<at::Tensor>& parameters);
  // Divides what the step made, and adds it to what was there, which stays the same tensor. What
  // add_earlier() did is not done again.
  void end(int64_t divisor);
  // Drops what the step made.
  void abandon();

 private:
  struct Held {
    at::Tensor parameter;
    at::Tensor before;
    bool is_whole = false;  // .grad holds what was there before, too
  };
  std::vector<Held> held_;
  std::unordered_map<const c10::TensorImpl*, size_t> places_;
};

}  // namespace trireme
