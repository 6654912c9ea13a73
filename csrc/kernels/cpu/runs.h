#pragma once

#include <trireme/kernels/span.h>

namespace trireme::cpu {

// scaled_copy and scaled_add on the calling thread, whatever the length. Dtypes are checked,
// lengths are not.
void copy_run(Span dst, ConstSpan src, double scale);
void add_run(Span dst, ConstSpan src, double scale);

}  // namespace trireme::cpu
