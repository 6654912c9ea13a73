#pragma once

#include <cstdint>
#include <vector>

namespace trireme {

// The time of a micro-batch in one stage, in any unit. B takes input + weight, R takes forward.
struct StageCosts {
  double forward = 1;
  double input = 1;
  double weight = 1;
};

struct ScheduleCosts {
  std::vector<StageCosts> stages = {StageCosts{}};  // one for all stages, or one for each
  double message = 0;  // from the end of an action to the beginning of one on another rank

  const StageCosts& of(int64_t stage) const {
    return stages[stages.size() == 1 ? 0 : static_cast<size_t>(stage)];
  }
};

// Throws ValueError unless there are costs for one stage or for `stages`, finite and 0 or more.
void check_costs(const ScheduleCosts& costs, int64_t stages);

}  // namespace trireme
