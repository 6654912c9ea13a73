#pragma once

#include <trireme/common/export.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace trireme {

// Sets the number of threads in parallel regions of ATen, OpenMP and MKL begun by this thread, and
// no other's: at::set_num_threads() would also tell every thread that starts later.
TRIREME_API void set_own_intra_op_threads(int threads);

// Returns the intra-op threads of each worker, which together are `threads`, so that each core is
// used once; at least 1 each: 5 threads for 2 workers are 3 and 2.
TRIREME_API std::vector<int> intra_op_threads_of(int64_t threads, size_t workers);

}  // namespace trireme
