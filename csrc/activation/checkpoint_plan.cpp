#include <trireme/activation/checkpoint_plan.h>

#include <trireme/common/error.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <memory>
#include <utility>

namespace trireme {
namespace {

constexpr size_t kMostStates = 4096;
constexpr int64_t kSteps = 1000;  // parts of the budget, where there are more states than that

// The decision about one layer, linked to the decisions about the layers before it.
struct Decision {
  bool recompute;
  std::shared_ptr<const Decision> before;
};

// The bytes that the layers so far hold until their backward, and the extra time this costs.
struct State {
  int64_t held = 0;
  double extra = 0;
  std::shared_ptr<const Decision> last;
};

// Keeps the states that no other state beats in both bytes and time.
void drop_beaten(std::vector<State>& states) {
  std::stable_sort(states.begin(), states.end(), [](const State& a, const State& b) {
    return a.held != b.held ? a.held < b.held : a.extra < b.extra;
  });
  double best = std::numeric_limits<double>::infinity();
  std::erase_if(states, [&](const State& state) {
    if (state.extra >= best) {
      return true;
    }
    best = state.extra;
    return false;
  });
}

// Keeps the cheapest state of each thousandth of the budget, and the state that holds least, so
// that one always fits.
void thin_out(std::vector<State>& states, int64_t budget) {
  const auto step_of = [&](const State& state) {
    return static_cast<int64_t>(static_cast<double>(state.held) * kSteps /
                                static_cast<double>(std::max<int64_t>(budget, 1)));
  };
  std::vector<State> remaining;
  for (State& state : states) {  // ascending in bytes, descending in time
    if (remaining.size() > 1 && step_of(remaining.back()) == step_of(state)) {
      remaining.back() = std::move(state);
    } else {
      remaining.push_back(std::move(state));
    }
  }
  states = std::move(remaining);
}

// Returns a layer's bytes while it runs, in its forward or recomputed in its backward.
int64_t running_bytes(const LayerCost& layer, bool recompute) {
  return recompute ? std::max(layer.bytes, layer.kept) : layer.bytes;
}

void check(const std::vector<LayerCost>& layers, int64_t budget) {
  int64_t least = 0;
  int64_t held = 0;
  for (size_t i = 0; i < layers.size(); ++i) {
    const LayerCost& layer = layers[i];
    const bool is_valid =
        layer.bytes >= 0 && layer.kept >= 0 && layer.time >= 0 && std::isfinite(layer.time);
    TORCH_CHECK_VALUE(
        is_valid,
        error_text("checkpoint",
                   c10::str("layer ", i, " has ", layer.bytes, " bytes, keeps ", layer.kept,
                            " and takes ", layer.time, ", expected finite numbers, 0 or more"),
                   {}, "Measure the layer again."));
    least = std::max(least, held + layer.bytes);
    held += std::min(layer.bytes, layer.kept);
  }
  TORCH_CHECK_VALUE(budget >= least,
                    error_text("checkpoint",
                               c10::str("got a budget of ", budget, " bytes, expected at least ",
                                        least, ", the least that any choice holds"),
                               {}, "Raise the budget, or make the batch smaller."));
}

std::vector<bool> choices_of(const State& state, size_t layers) {
  std::vector<bool> recompute(layers);
  const Decision* decision = state.last.get();
  for (size_t i = layers; i-- > 0; decision = decision->before.get()) {
    recompute[i] = decision->recompute;
  }
  return recompute;
}

}  // namespace

CheckpointPlan plan_of(const std::vector<LayerCost>& layers, std::vector<bool> recompute) {
  CheckpointPlan plan{std::move(recompute), 0, 0};
  TORCH_CHECK_VALUE(plan.recompute.size() == layers.size(),
                    error_text("checkpoint",
                               c10::str("got choices for ", plan.recompute.size(),
                                        " layers, expected ", layers.size()),
                               {}, "Pass one per layer."));
  int64_t held = 0;
  for (size_t i = 0; i < layers.size(); ++i) {
    plan.bytes = std::max(plan.bytes, held + running_bytes(layers[i], plan.recompute[i]));
    if (plan.recompute[i]) {
      plan.extra_time += layers[i].time;
      held += layers[i].kept;
    } else {
      held += layers[i].bytes;
    }
  }
  return plan;
}

CheckpointPlan checkpoint_plan(const std::vector<LayerCost>& layers, int64_t budget_bytes) {
  check(layers, budget_bytes);
  std::vector<State> states(1);
  for (const LayerCost& layer : layers) {
    std::vector<State> next;
    for (const State& state : states) {
      for (const bool recompute : {false, true}) {
        if (state.held + running_bytes(layer, recompute) <= budget_bytes) {
          next.push_back({state.held + (recompute ? layer.kept : layer.bytes),
                          state.extra + (recompute ? layer.time : 0),
                          std::make_shared<const Decision>(Decision{recompute, state.last})});
        }
      }
    }
    drop_beaten(next);
    if (next.size() > kMostStates) {
      thin_out(next, budget_bytes);
    }
    states = std::move(next);
  }
  // The state that holds most has the least extra time; check() has made sure that one fits.
  return plan_of(layers, choices_of(states.back(), layers.size()));
}

std::vector<int64_t> segment_bounds(int64_t layers, int64_t segments) {
  TORCH_CHECK_VALUE(1 <= segments && segments <= layers,
                    error_text("checkpoint",
                               c10::str("got ", segments, " segments, expected 1 to ", layers,
                                        ", the number of layers"),
                               {}, "Pass fewer segments, or \"sqrt\"."));
  std::vector<int64_t> bounds;
  for (int64_t i = 0; i < segments; ++i) {
    bounds.push_back(i * (layers / segments));
  }
  bounds.push_back(layers);
  return bounds;
}

int64_t square_root_segments(int64_t layers) {
  return static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(layers))));
}

std::string to_string(const CheckpointPlan& plan) {
  std::string choices;
  for (const bool recompute : plan.recompute) {
    choices += recompute ? 'R' : '.';
  }
  return c10::str(choices, " holds ", plan.bytes, " bytes, ", plan.extra_time, " extra");
}

}  // namespace trireme
