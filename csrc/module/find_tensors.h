#pragma once

#include <trireme/module/for_each_tensor.h>

#include <ATen/core/Tensor.h>

#include <vector>

namespace trireme {

// Returns the defined tensors in the result of a C++ module's forward(). Types that
// for_each_tensor() does not know count as without tensors; a reducer then arms at the first
// parameter's gradient (see grad/backward_trigger.h).
template <typename Output>
std::vector<at::Tensor> find_tensors(const Output& output) {
  std::vector<at::Tensor> found;
  for_each_tensor(output, [&](const at::Tensor& tensor) {
    if (tensor.defined()) found.push_back(tensor);
  });
  return found;
}

}  // namespace trireme
