#include <trireme/common/intra_op_threads.h>

#include <ATen/Parallel.h>

#include <algorithm>
#include <mutex>

// Functions of the OpenMP runtime and the MKL that torch has loaded; null in a torch without them.
extern "C" {
__attribute__((weak)) void omp_set_num_threads(int threads);
__attribute__((weak)) int MKL_Set_Num_Threads_Local(int threads);
}

namespace trireme {

void set_own_intra_op_threads(int threads) {
  // ATen sets a thread's numbers when it is first asked there; after that it leaves them alone. In
  // a forked child the first ones must not ask at once: it makes its thread pool anew then,
  // unlocked.
  static std::mutex asking;
  {
    const std::lock_guard lock(asking);
    static_cast<void>(at::get_num_threads());
  }
  if (omp_set_num_threads != nullptr) omp_set_num_threads(threads);
  if (MKL_Set_Num_Threads_Local != nullptr) MKL_Set_Num_Threads_Local(threads);
}

std::vector<int> intra_op_threads_of(int64_t threads, size_t workers) {
  const auto count = static_cast<int64_t>(workers);
  std::vector<int> shares;
  for (int64_t worker = 0; worker < count; ++worker) {
    const int64_t share = threads / count + (worker < threads % count ? 1 : 0);
    shares.push_back(static_cast<int>(std::max<int64_t>(1, share)));
  }
  return shares;
}

}  // namespace trireme
