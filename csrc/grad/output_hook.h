#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <functional>

namespace trireme {

// Calls `arrived` whenever backward has brought a gradient to `output`, which a function has made
// (not a leaf), before it goes on from there. On autograd's thread, without the GIL; what it throws
// comes out of backward().
TRIREME_API void on_output_gradient(const at::Tensor& output, std::function<void()> arrived);

}  // namespace trireme
