#pragma once

#include <trireme/common/export.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

namespace trireme {

// The total times of waits, by cause. Any thread may call it.
class TRIREME_API WaitTimes {
 public:
  // Counts a wait from now on until the result goes.
  std::shared_ptr<void> count(std::string_view cause);
  // Returns seconds by cause.
  std::map<std::string, double> seconds() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, double, std::less<>> seconds_;
};

}  // namespace trireme
