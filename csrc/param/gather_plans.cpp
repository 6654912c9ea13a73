#include <trireme/param/gather_plans.h>

#include <algorithm>
#include <optional>
#include <utility>

// See [Note: plans that fail] in gather_plans.h.

namespace trireme {
namespace {

using Plan = GatherPlans::Plan;

constexpr int64_t kMostFailures = 16;

bool has(const Plan& plan, int64_t unit) {
  return std::find(plan.begin(), plan.end(), unit) != plan.end();
}

// Returns the plan with places for the units that it lacked; nothing if more than these differ.
std::optional<Plan> with_places(const Plan& plan, const GatherPlans::Left& left) {
  auto rest = plan.begin() + left.used;
  Plan made(plan.begin(), rest);
  for (const int64_t unit : left.instead) {
    const auto planned = std::find(rest, plan.end(), unit);
    if (planned != plan.end()) {
      made.insert(made.end(), rest, planned + 1);
      rest = planned + 1;
    } else if (!has(plan, unit) && !has(made, unit)) {
      made.push_back(unit);
    } else {
      return std::nullopt;
    }
    const auto ahead = plan.begin() + left.gathered;  // needed from here on, if at all
    if (rest < ahead) made.insert(made.end(), std::exchange(rest, ahead), ahead);
  }
  made.insert(made.end(), rest, plan.end());
  const int64_t used = left.needed + static_cast<int64_t>(left.instead.size());
  if (2 * static_cast<int64_t>(made.size()) > 3 * used) return std::nullopt;
  return made;
}

}  // namespace

const Plan* GatherPlans::find(const Key& key) const {
  const auto found = known_.find(key);
  return found == known_.end() || !found->second.is_followed() ? nullptr : &found->second.plan;
}

const Plan* GatherPlans::find_last(const Key& key) const {
  const auto found = known_.find(key);
  return found == known_.end() ? nullptr : &found->second.plan;
}

void GatherPlans::learn(const Key& key, const Plan& gathered) {
  Known& known = known_[key];
  known.repeats = known.plan == gathered ? known.repeats + 1 : 0;
  known.plan = gathered;
}

void GatherPlans::leave(const Key& key, const Left& left, const Plan& gathered) {
  Known& known = known_[key];
  // Plans may have been forgotten while the pass ran.
  const bool is_known =
      static_cast<int64_t>(known.plan.size()) >= std::max(left.used, left.gathered);
  if (std::optional<Plan> longer = is_known ? with_places(known.plan, left) : std::nullopt) {
    known.plan = std::move(*longer);
    return;
  }
  known.failures = std::min(known.failures + 1, kMostFailures);
  known.repeats = 0;
  known.plan = gathered;
}

}  // namespace trireme
