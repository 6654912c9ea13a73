#include <trireme/strategies/pipeline/stage_costs.h>

#include <trireme/strategies/pipeline/refuse.h>

#include <cmath>
#include <string>

namespace trireme {
namespace {

bool is_cost(double cost) { return std::isfinite(cost) && cost >= 0; }

}  // namespace

void check_costs(const ScheduleCosts& costs, int64_t stages) {
  const auto given = static_cast<int64_t>(costs.stages.size());
  if (given != 1 && given != stages) {
    refuse_pipeline("got costs for " + std::to_string(given) + " stages, expected 1 or " +
                        std::to_string(stages),
                    "Give one cost for all stages, or one for each.");
  }
  bool are_costs = is_cost(costs.message);
  for (const StageCosts& stage : costs.stages) {
    are_costs =
        are_costs && is_cost(stage.forward) && is_cost(stage.input) && is_cost(stage.weight);
  }
  if (!are_costs) {
    refuse_pipeline("got a cost that is below 0 or no finite number, expected times",
                    "Measure the stages again.");
  }
}

}  // namespace trireme
