// How parameters are cut into fragments and dealt to ranks, and what options are refused.

#include <trireme/strategies/local_sgd/fragment_plan.h>

#include <trireme/strategies/local_sgd/round_options.h>

#include <c10/util/Exception.h>

#include <catch_torch.h>
#include <vector>

namespace trireme::fragment_plan_test {

using Fragments = std::vector<Fragment>;

TEST_CASE("parameters are cut in their order, by bytes, and no fragment is empty") {
  CHECK(cut_by_bytes({4, 4, 4, 4}, 1) == Fragments{{0, 1, 2, 3}});
  CHECK(cut_by_bytes({4, 4, 4, 4}, 2) == Fragments{{0, 1}, {2, 3}});
  CHECK(cut_by_bytes({100, 1, 1, 100}, 2) == Fragments{{0, 1}, {2, 3}});
  CHECK(cut_by_bytes({1, 1, 1, 100}, 2) == Fragments{{0, 1, 2}, {3}});
  CHECK(cut_by_bytes({100, 1, 1, 1}, 3) == Fragments{{0}, {1}, {2, 3}});
  CHECK(cut_by_bytes({0, 0, 0}, 3) == Fragments{{0}, {1}, {2}});
  CHECK(cut_by_bytes({1, 100, 100}, 3) == Fragments{{0}, {1}, {2}});
  CHECK_THROWS_AS(cut_by_bytes({1, 1}, 3), c10::ValueError);
}

TEST_CASE("parameters are dealt to ranks by bytes") {
  CHECK(deal_by_bytes({5, 5, 5, 5}, 2) == std::vector<int64_t>{0, 1, 0, 1});
  CHECK(deal_by_bytes({9, 1, 1, 8}, 2) == std::vector<int64_t>{0, 1, 0, 1});
  CHECK(deal_by_bytes({7}, 3) == std::vector<int64_t>{0});
}

TEST_CASE("options that cannot be are refused") {
  const std::vector<RoundOptions> wrong = {
      {.sync_every = 0},
      {.sync_every = 4, .warmup_steps = -1},
      {.sync_every = 4, .fragments = 0},
      {.sync_every = 4, .fragments = 3},
      {.sync_every = 4, .fragments = 2, .fragment_sync_delay = 2},
      {.sync_every = 4, .fragment_sync_delay = -1},
      {.sync_every = 4, .fragment_update_alpha = -0.5},
      {.sync_every = 4, .compression = TopK{.density = 0}},
  };
  for (const RoundOptions& options : wrong) CHECK_THROWS_AS(check(options), c10::ValueError);
  check({.sync_every = 4, .fragments = 2, .fragment_sync_delay = 1, .fragment_update_alpha = 1});
}

}  // namespace trireme::fragment_plan_test
