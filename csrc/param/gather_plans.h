#pragma once

#include <trireme/common/export.h>

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace trireme {

// [Note: plans that fail]
//
// A pass leaves its plan when it needs a unit that has no place there any more. The gathers before
// that, and those that ranks agreed on afterwards, decide what becomes of the plan:
//
//   it lacked units   they get their places in it, as long as it is not much longer than what such
//                     a pass uses (stochastic depth: the first pass had left some layers out)
//   else              passes of this kind agree about each gather (loops of varying length, one of
//                     many experts), until 2, then 4, 8, ... of them in a row have had one order
//
// All ranks see the same of each pass, so they come to the same plans.

// The order of gathers in passes of each kind. Pure values; equal on all ranks.
class TRIREME_API GatherPlans {
 public:
  using Plan = std::vector<int64_t>;     // units, in order
  using Key = std::pair<int64_t, bool>;  // where a forward begins, whether it trains

  // Returns the plan of passes of this kind; null if they are to make one.
  const Plan* find(const Key& key) const;
  // Returns the last plan of passes of this kind, followed or not; null if there was none.
  const Plan* find_last(const Key& key) const;
  bool is_empty() const { return known_.empty(); }
  void clear() { known_.clear(); }

  // Learns the gathers of a pass that made its plan.
  void learn(const Key& key, const Plan& gathered);
  // How a pass left its plan.
  struct Left {
    int64_t used = 0;      // places in the plan, up to the last one that was needed before
    int64_t needed = 0;    // how many of them were needed
    int64_t gathered = 0;  // places in the plan, with those gathered ahead
    Plan instead;          // gathers after it left the plan
  };
  // Learns that a pass left its plan, and all that it gathered.
  void leave(const Key& key, const Left& left, const Plan& gathered);

 private:
  struct Known {
    Plan plan;
    int64_t failures = 0;
    int64_t repeats = 0;  // passes in a row that gathered by this plan without following it
    bool is_followed() const { return failures == 0 || repeats >= int64_t{1} << failures; }
  };
  std::map<Key, Known> known_;
};

}  // namespace trireme
