#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/remote/definitions.h>
#include <trireme/strategies/remote/served_call.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace trireme::remote {

// Gathers calls of methods that are served so many at once. Thread-safe.
class TRIREME_API Batches {
 public:
  struct Gathered {
    std::vector<ServedCall> calls = {};  // complete, or none
    std::vector<ServedCall> late = {};   // dropped: their callers wait no more
  };
  // Adds a call to those that wait, and takes them once they are enough.
  Gathered add(const Definition& definition, ServedCall call);
  // Drops the calls of a rank that is gone.
  void forget(int64_t rank);

 private:
  using Key = std::pair<const Hosted*, std::string>;
  std::mutex mutex_;
  std::map<Key, std::vector<ServedCall>> waiting_;
};

// Calls the definition once: each argument is the list of what the calls have in its place. Returns
// a result per call. Throws c10::ValueError where calls differ in their arguments, and TypeError
// where it does not return a list of as many.
TRIREME_API Values call_batch(const Definition& definition, const std::vector<ServedCall>& calls);

}  // namespace trireme::remote
