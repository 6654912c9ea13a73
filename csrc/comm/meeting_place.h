#pragma once

#include <trireme/comm/group_health.h>
#include <trireme/comm/progress.h>
#include <trireme/common/export.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace trireme {

// Lets the ranks of a group come together by their Store, where it is not certain that all of them
// do: a verb of the group would meet some other verb of the ranks that do not, and mix up what both
// move. Costs some round trips to the Store.
//
// All ranks make their places of one group in one order.
class TRIREME_API MeetingPlace {
 public:
  // Without a health, or a Store, nobody can be met, and meet() returns no more than `number`.
  explicit MeetingPlace(std::shared_ptr<GroupHealth> health);

  // Returns when all ranks have come: the numbers that they bring, by rank. `what` names the
  // occasion. Throws c10::DistBackendError with
  // what a peer announced meanwhile, with what a watch of the group says, or, after the Store's
  // timeout, with a rank that has not come.
  std::vector<int64_t> meet(int64_t number, const std::string& what);
  const std::shared_ptr<Progress>& progress() const { return progress_; }
  // Leaves `words` and returns those that all ranks have left within `patience`; empty for a rank
  // that has left none. Once in the life of a place; never throws.
  std::vector<std::string> exchange(const std::string& words, std::chrono::milliseconds patience);

 private:
  std::string key(const std::string& topic, int64_t rank) const;
  [[noreturn]] void refuse(const std::string& what);
  [[noreturn]] void refuse_without(int64_t rank, const std::string& what);
  [[noreturn]] void refuse_in_words(const std::string& text);

  std::shared_ptr<GroupHealth> health_;
  int64_t number_ = 0;
  std::shared_ptr<Progress> progress_ = std::make_shared<Progress>();
};

}  // namespace trireme
