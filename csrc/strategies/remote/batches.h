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

// Gathers calls of batched methods until a batch is complete. Thread-safe.
class TRIREME_API Batches {
 public:
  struct Gathered {
    std::vector<ServedCall> calls = {};  // complete, or none
    std::vector<ServedCall> late = {};   // dropped: their deadlines have passed
  };
  // Adds a call to the waiting ones, and takes them once they are a batch.
  Gathered add(const Definition& definition, ServedCall call);
  // Drops the calls of a rank that is gone.
  void forget(int64_t rank);
  // Drops a call that its caller has given up.
  void forget(int64_t rank, int64_t number);

 private:
  template <typename IsGone>
  void drop(const IsGone& is_gone);

  using Key = std::pair<const Hosted*, std::string>;
  std::mutex mutex_;
  std::map<Key, std::vector<ServedCall>> waiting_;
};

// Calls the definition once: each argument is the list of the calls' arguments in its place.
// Returns a result per call. Throws c10::ValueError if calls differ in number or keywords of
// arguments, and TypeError if the definition does not return a list of one result per call.
TRIREME_API Values call_batch(const Definition& definition, const std::vector<ServedCall>& calls);

}  // namespace trireme::remote
