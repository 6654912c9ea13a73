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

// Lets the ranks of a group meet through their Store if it is not certain that all of them come: a
// verb of the group would meet another verb of ranks that do not come, and mix up the data of both.
// Costs some round trips to the Store.
//
// All ranks make the places of one group in the same order.
class TRIREME_API MeetingPlace {
 public:
  // Without a health, or a Store, meet() returns `number` alone.
  explicit MeetingPlace(std::shared_ptr<GroupHealth> health);

  // Waits until all ranks have come, and returns the numbers that they bring, by rank. `what` names
  // the occasion. Throws c10::DistBackendError with the failure that a peer announced, with the
  // reason that a watch of the group gives, or, after the Store's timeout, with a rank that has not
  // come.
  std::vector<int64_t> meet(int64_t number, const std::string& what);
  const std::shared_ptr<Progress>& progress() const { return progress_; }
  // Leaves `words` and returns the texts that all ranks have left within `patience`; empty for a
  // rank that has left none. Called once per place; never throws.
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
