#include <ATen/Parallel.h>

#include <trireme/kernels/cpu/parallel.h>

// at::parallel_for is a header: it uses threads only in a file that is compiled with OpenMP, as
// this one is.
namespace trireme::cpu {

void for_ranges(int64_t numel, c10::function_ref<void(int64_t, int64_t)> body, int64_t grain) {
  if (numel <= grain) return body(0, numel);
  at::parallel_for(0, numel, grain, body);
}

}  // namespace trireme::cpu
