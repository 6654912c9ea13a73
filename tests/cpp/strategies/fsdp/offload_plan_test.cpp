// Tells which parameters of units are offloaded.

#include <trireme/strategies/fsdp/offload_plan.h>

#include <catch_torch.h>
#include <cmath>
#include <string>

namespace trireme::offload_plan_test {

using trireme::test::error_of;

namespace {

using Units = std::vector<std::vector<int64_t>>;  // bytes of their parameters

// A letter per parameter: o for the optimizer's part, A for all, - for none.
std::string drawn(double optimizer, double params, const Units& units) {
  std::string picture;
  OffloadOwed owed;
  for (const std::vector<int64_t>& unit : units) {
    const OffloadPlan plan = make_offload_plan({optimizer, params, unit, owed});
    owed = plan.owed;
    if (!picture.empty()) picture += ' ';
    for (const ShardOffload kind : plan.parameters)
      picture += kind == ShardOffload::kAll ? 'A' : kind == ShardOffload::kOptimizer ? 'o' : '-';
  }
  return picture;
}

}  // namespace

TEST_CASE("whole parameters are chosen, from the front of each unit") {
  const std::vector<int64_t> even(4, 10);
  CHECK(drawn(1, 0, {even}) == "oooo");
  CHECK(drawn(1, 1, {even}) == "AAAA");
  CHECK(drawn(0, 0, {even}) == "----");
  CHECK(drawn(1, 0.5, {even}) == "AAoo");
  CHECK(drawn(0.75, 0.25, {even}) == "Aoo-");
  CHECK(drawn(0.5, 0.5, {{7}, {}}) == "- ");  // between two that are as near: the fewer
}

TEST_CASE("each unit rounds so that the total comes nearest") {
  CHECK(drawn(0.5, 0, Units(4, {100, 10})) == "o- -- o- --");
  CHECK(drawn(0.5, 0.5, Units(6, {8})) == "- A - A - A");
  CHECK(drawn(0.34, 0, Units(9, {8})) == "- o - - o - - o -");
}

TEST_CASE("what is owed says by how much less was offloaded") {
  const OffloadPlan plan = make_offload_plan({0.5, 0.25, std::vector<int64_t>{100, 10}, {}});
  CHECK(plan.owed.optimizer == Approx(55 - 100));
  CHECK(plan.owed.params == Approx(27.5));
}

TEST_CASE("fractions that are none are refused") {
  const std::vector<std::pair<double, double>> cases{
      {0.5, 0.6}, {1.1, 0}, {0.5, -0.1}, {std::nan(""), 0}, {1, std::nan("")}};
  for (const auto& [optimizer, params] : cases) {
    CAPTURE(optimizer, params);
    const Offload offload{.optimizer = optimizer, .params = params};
    const std::string said = error_of<c10::ValueError>([&] { check_offload(offload, {1, 2}); });
    CHECK_THAT(said, Catch::Contains("expected 0 <= params <= optimizer <= 1 (rank 1 of 2). Pass "
                                     "fractions; what has no copy on the device is a part of what "
                                     "is offloaded."));
  }
  CHECK_THAT(
      error_of<c10::ValueError>([] { check_offload({.optimizer = 0.5, .params = 0.6}, {}); }),
      Catch::Contains("[fully_shard] got Offload(optimizer=0.5, params=0.6), expected "));
  CHECK(error_of<c10::ValueError>([] { check_offload({}, {}); }) == "no error");
}

}  // namespace trireme::offload_plan_test
