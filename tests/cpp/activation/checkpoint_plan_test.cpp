#include <trireme/activation/checkpoint_plan.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "catch_torch.h"

namespace trireme {
namespace {

// Looks at every choice there is.
CheckpointPlan best_of_all(const std::vector<LayerCost>& layers, int64_t budget) {
  CheckpointPlan best;
  best.extra_time = 1e300;
  for (uint32_t choice = 0; choice < (1U << layers.size()); ++choice) {
    std::vector<bool> recompute;
    for (size_t i = 0; i < layers.size(); ++i) {
      recompute.push_back((choice >> i & 1U) != 0);
    }
    const CheckpointPlan plan = plan_of(layers, recompute);
    if (plan.bytes <= budget && plan.extra_time < best.extra_time) {
      best = plan;
    }
  }
  return best;
}

TEST_CASE("layers are recomputed where that costs the least time") {
  const std::vector<LayerCost> layers{{100, 1}, {100, 5}, {50, 1}, {100, 1}};
  // 350 bytes in all: everything stays.
  CHECK(to_string(checkpoint_plan(layers, 350)) == ".... holds 350 bytes, 0 extra");
  // The last layer is held by nobody's backward but its own: it is never recomputed.
  CHECK(to_string(checkpoint_plan(layers, 349)) == "R... holds 250 bytes, 1 extra");
  CHECK(to_string(checkpoint_plan(layers, 249)) == "R.R. holds 200 bytes, 2 extra");
  CHECK(to_string(checkpoint_plan(layers, 100)) == "RRR. holds 100 bytes, 7 extra");
}

TEST_CASE("a recomputed layer keeps its input") {
  const std::vector<LayerCost> layers{{100, 1, 0}, {100, 5, 30}, {20, 1, 30}, {100, 1, 30}};
  CHECK(to_string(plan_of(layers, {true, true, false, true})) == "RR.R holds 150 bytes, 7 extra");
  CHECK(to_string(checkpoint_plan(layers, 319)) == "R... holds 220 bytes, 1 extra");
  // Layer 2 takes less than its input: it is never recomputed.
  CHECK(to_string(checkpoint_plan(layers, 150)) == "RR.. holds 150 bytes, 6 extra");
  CHECK_THROWS_WITH(checkpoint_plan(layers, 149), Catch::Contains("expected at least 150"));
  CHECK(plan_of({{20, 1, 30}}, {true}).bytes == 30);
}

TEST_CASE("no choice is better than the one of the plan") {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    std::vector<LayerCost> layers(1 + random() % 9);
    int64_t total = 0;
    int64_t held = 0;
    int64_t least = 0;
    for (LayerCost& layer : layers) {
      layer = {static_cast<int64_t>(random() % 1000), static_cast<double>(random() % 20),
               static_cast<int64_t>(random() % 400)};
      total += layer.bytes;
      least = std::max(least, held + layer.bytes);
      held += std::min(layer.bytes, layer.kept);
    }
    const auto budget = least + static_cast<int64_t>(random() % (total - least + 1));
    const CheckpointPlan plan = checkpoint_plan(layers, budget);
    CHECK(plan.bytes <= budget);
    CHECK(plan.extra_time == best_of_all(layers, budget).extra_time);
    CHECK(plan == plan_of(layers, plan.recompute));
  }
}

TEST_CASE("hundreds of layers of all sizes use nearly the whole budget") {
  std::mt19937 random(5);
  std::vector<LayerCost> layers(300);
  int64_t total = 0;
  for (LayerCost& layer : layers) {
    layer = {static_cast<int64_t>(random() % (1U << 30)), static_cast<double>(random() % 1000) + 1};
    total += layer.bytes;
  }
  const CheckpointPlan plan = checkpoint_plan(layers, total / 2);
  CHECK(plan.bytes <= total / 2);
  CHECK(plan.bytes > total / 2 * 0.99);
}

TEST_CASE("wrong costs and budgets are refused with what would do") {
  CHECK_THROWS_WITH(checkpoint_plan({{100, 1}, {300, 1}}, 299),
                    Catch::Contains("got a budget of 299 bytes, expected at least 300"));
  CHECK_THROWS_WITH(checkpoint_plan({{100, 1}, {-1, 1}}, 299),
                    Catch::Contains("layer 1 has -1 bytes"));
  CHECK_THROWS_AS(plan_of({{100, 1}}, {}), c10::ValueError);
  CHECK(checkpoint_plan({}, 0) == CheckpointPlan{});
}

TEST_CASE("segments are those of torch") {
  CHECK(segment_bounds(7, 3) == std::vector<int64_t>{0, 2, 4, 7});
  CHECK(segment_bounds(1, 1) == std::vector<int64_t>{0, 1});
  CHECK(square_root_segments(10) == 4);
  CHECK_THROWS_WITH(segment_bounds(3, 4), Catch::Contains("got 4 segments, expected 1 to 3"));
  CHECK_THROWS_AS(segment_bounds(3, 0), c10::ValueError);
}

}  // namespace
}  // namespace trireme
