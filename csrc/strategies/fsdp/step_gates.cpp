#include <trireme/strategies/fsdp/step_gates.h>

#include <algorithm>
#include <map>
#include <utility>

namespace trireme {
namespace {

// Returns the parts of each rank that other hosts read, in all groups.
PartsByRank parts_of(const std::vector<std::shared_ptr<ParamGroup>>& groups) {
  PartsByRank all;
  for (const auto& group : groups) {
    const PartsByRank parts = group->memory().parts();
    all.resize(std::max(all.size(), parts.size()));
    for (size_t rank = 0; rank < parts.size(); ++rank)
      all[rank].insert(all[rank].end(), parts[rank].begin(), parts[rank].end());
  }
  return all;
}

}  // namespace

StepGates::StepGates(const std::vector<std::shared_ptr<ParamGroup>>& groups,
                     const std::vector<size_t>& ranks_of) {
  std::map<size_t, std::vector<std::shared_ptr<ParamGroup>>> by_ranks;
  for (size_t i = 0; i < groups.size(); ++i) by_ranks[ranks_of.at(i)].push_back(groups[i]);
  for (const auto& [ranks, own] : by_ranks)
    gates_.emplace_back(own.front()->store(), own.front()->communicator(), parts_of(own));
}

bool StepGates::is_writing() const {
  return std::any_of(gates_.begin(), gates_.end(),
                     [](const StepGate& gate) { return gate.is_writing(); });
}

void StepGates::begin_reading() {
  for (StepGate& gate : gates_) gate.begin_reading();
}

FactorRange StepGates::begin_writing(const FactorRange& own) {
  FactorRange of_all = own;
  for (StepGate& gate : gates_) of_all = of_all & gate.begin_writing(own);
  return of_all;
}

}  // namespace trireme
