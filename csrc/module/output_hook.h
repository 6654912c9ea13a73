#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

namespace trireme {

// Calls `arrived` whenever backward has brought a gradient to `output`, which a function has made
// (not a leaf), before it goes on from there. On autograd's thread, without the GIL; what it throws
// comes out of backward().
TRIREME_API void on_gradient(const at::Tensor& output, std::function<void()> arrived);

// Does what on_gradient() does, also if a caller changes `output` in place, and it is a view:
// autograd then skips the view's function, and goes on to its base's. `arrived` may then be called
// a little late, but before backward comes to anything from which the base was made. A base whose
// function is older than `first_node` (at::sequence_number::peek() when the module began) is not
// the module's and stays unwatched.
TRIREME_API void on_output_gradient(const at::Tensor& output, std::function<void()> arrived,
                                    uint64_t first_node = 0);

}  // namespace trireme
