#pragma once

#include <trireme/common/export.h>

namespace trireme {

// Sets how many threads the parallel regions of ATen, OpenMP and MKL have that the calling thread
// begins, and no other's: at::set_num_threads() would also tell every thread that starts later.
TRIREME_API void set_own_intra_op_threads(int threads);

}  // namespace trireme
