#include <trireme/strategies/pipeline/gradients/stage_strategies.h>

#include <algorithm>
#include <utility>

namespace trireme {

std::vector<at::Tensor> StageStrategies::begin_step(const std::vector<at::Tensor>& parameters) {
  end_step();
  held_ = given_;
  for (const auto& strategy : held_) strategy->hold(true);
  std::vector<at::Tensor> others;
  for (const at::Tensor& parameter : parameters) {
    std::shared_ptr<DeferredSync> strategy = deferred_sync_of(parameter);
    if (!strategy) {
      others.push_back(parameter);
    } else if (std::find(held_.begin(), held_.end(), strategy) == held_.end()) {
      strategy->hold(true);
      held_.push_back(std::move(strategy));
    }
  }
  return others;
}

void StageStrategies::before_last_backward() {
  for (const auto& strategy : held_) strategy->prepare_for_backward();
}

void StageStrategies::after_last_backward() {
  for (const auto& strategy : held_) strategy->synchronize_unreached();
}

void StageStrategies::abandon(const std::string& why) noexcept {
  for (const auto& strategy : held_) {
    strategy->announce_failure(why);
    try {
      strategy->hold(false);
    } catch (...) {  // what the caller throws came first
    }
  }
  held_.clear();
}

void StageStrategies::end_step() {
  for (const auto& strategy : held_) strategy->hold(false);
  held_.clear();
}

}  // namespace trireme
