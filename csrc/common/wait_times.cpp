#include <trireme/common/wait_times.h>

#include <chrono>

namespace trireme {

std::shared_ptr<void> WaitTimes::count(std::string_view cause) {
  return {nullptr, [this, cause, begin = std::chrono::steady_clock::now()](void*) {
            const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
            const std::lock_guard<std::mutex> lock(mutex_);
            const auto found = seconds_.find(cause);
            (found != seconds_.end() ? found->second : seconds_[std::string(cause)]) +=
                took.count();
          }};
}

std::map<std::string, double> WaitTimes::seconds() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {seconds_.begin(), seconds_.end()};
}

}  // namespace trireme
