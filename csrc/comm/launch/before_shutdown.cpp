#include <trireme/comm/launch/before_shutdown.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace trireme {
namespace {

struct BeforeShutdown {
  std::mutex mutex;
  std::vector<void (*)(bool)> functions;

  static BeforeShutdown& instance() {
    static auto& all = *new BeforeShutdown;
    return all;
  }
};

}  // namespace

void call_before_shutdown(void (*function)(bool is_failing)) {
  BeforeShutdown& all = BeforeShutdown::instance();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (std::find(all.functions.begin(), all.functions.end(), function) == all.functions.end())
    all.functions.push_back(function);
}

void run_before_shutdown(bool is_failing) noexcept {
  BeforeShutdown& all = BeforeShutdown::instance();
  std::vector<void (*)(bool)> functions;
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    functions = all.functions;
  }
  for (const auto function : functions) function(is_failing);
}

}  // namespace trireme
