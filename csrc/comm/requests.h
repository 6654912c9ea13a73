#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace trireme {

// The requests of a rank that have no answer yet, by the numbers that name them in messages.
// Thread-safe.
template <typename Request>
class OpenRequests {
 public:
  using RequestPtr = std::shared_ptr<Request>;

  // Returns the number of the request.
  int64_t add(RequestPtr request) {
    const std::lock_guard lock(mutex_);
    all_.emplace(next_, std::move(request));
    return next_++;
  }
  // Removes and returns a request; null if nobody waits for its answer.
  RequestPtr take(int64_t number) {
    const std::lock_guard lock(mutex_);
    auto node = all_.extract(number);
    return node.empty() ? nullptr : std::move(node.mapped());
  }
  // Removes and returns the requests for which `fits` returns true, with their numbers.
  template <typename Fits>
  std::vector<std::pair<int64_t, RequestPtr>> take_if(const Fits& fits) {
    std::vector<std::pair<int64_t, RequestPtr>> taken;
    const std::lock_guard lock(mutex_);
    std::erase_if(all_, [&](auto& entry) {
      if (!fits(*entry.second)) return false;
      taken.emplace_back(entry.first, std::move(entry.second));
      return true;
    });
    return taken;
  }
  bool is_empty() const {
    const std::lock_guard lock(mutex_);
    return all_.empty();
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<int64_t, RequestPtr> all_;
  int64_t next_ = 0;
};

}  // namespace trireme
