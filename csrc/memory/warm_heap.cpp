#include <trireme/memory/warm_heap.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>

namespace trireme {
namespace {

constexpr int64_t kMostBytes =
    (int64_t{32} << 20) - (int64_t{64} << 10);  // above, glibc adapts no more

}  // namespace

void keep_heap_warm(int64_t bytes) {
  void* volatile block =
      std::malloc(static_cast<size_t>(std::clamp<int64_t>(bytes, 1, kMostBytes)));
  std::free(block);
}

}  // namespace trireme
