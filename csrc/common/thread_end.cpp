#include <trireme/common/thread_end.h>

#include <utility>
#include <vector>

namespace trireme {
namespace {
thread_local std::vector<std::function<void()>> at_end;
}  // namespace

void at_thread_end(std::function<void()> function) { at_end.push_back(std::move(function)); }

void end_thread() {
  while (!at_end.empty()) {
    const std::function<void()> last = std::move(at_end.back());
    at_end.pop_back();
    last();
  }
}

}  // namespace trireme
