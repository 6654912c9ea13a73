#include <trireme/strategies/pipeline/elastic_plan.h>

#include <trireme/pipetransformer/freeze_rule.h>

#include <catch_torch.h>
#include <cstdint>
#include <optional>
#include <vector>

namespace trireme::elastic_plan_test {

using Catch::Contains;
using Numbers = std::vector<int64_t>;

namespace {

struct Run {
  int64_t layers;
  int64_t ranks;
  double factor = 1.0 / 6;
  bool keeps_together = false;
};

ElasticPlanRequest request_of(const Run& run, int64_t frozen) {
  ElasticPlanRequest request;
  request.costs.assign(static_cast<size_t>(run.layers), 1.0);
  request.frozen = frozen;
  request.ranks = run.ranks;
  request.frozen_factor = run.factor;
  request.keep_frozen_together = run.keeps_together;
  return request;
}

// Tells the ranks of a pipeline in each epoch, while layers freeze by the schedule of 1/3.
Numbers ranks_by_epoch(const Run& run, int64_t epochs) {
  Numbers ranks;
  std::optional<int64_t> before;
  for (const int64_t frozen : freeze_schedule(run.layers, 1.0 / 3, epochs)) {
    ElasticPlanRequest request = request_of(run, frozen);
    request.before = before;
    const ElasticPlan plan = elastic_plan(request);
    REQUIRE(plan.ranks_per_pipeline * plan.replicas == run.ranks);
    before = plan.ranks_per_pipeline;
    ranks.push_back(plan.ranks_per_pipeline);
  }
  return ranks;
}

}  // namespace

TEST_CASE("a pipeline shrinks as its layers freeze") {
  CHECK(ranks_by_epoch({12, 4}, 8) == Numbers{4, 4, 4, 2, 2, 1, 1, 1});
  CHECK(ranks_by_epoch({12, 4, 0.0}, 5) == Numbers{4, 4, 2, 1, 1});
  CHECK(ranks_by_epoch({12, 4, 0.0, true}, 5) == Numbers{4, 4, 2, 1, 1});
  CHECK(ranks_by_epoch({24, 8}, 9) == Numbers{8, 8, 8, 4, 4, 4, 2, 2, 2});
  CHECK(ranks_by_epoch({8, 2}, 5) == Numbers{2, 2, 1, 1, 1});
  CHECK(ranks_by_epoch({9, 3}, 6) == Numbers{3, 3, 3, 3, 3, 3});  // odd
}

TEST_CASE("an elastic plan has the best cut and what it costs") {
  const ElasticPlan plan = elastic_plan(request_of({12, 4}, 9));
  CHECK(plan == ElasticPlan{2, 2, {10, 2}});
  CHECK(plan.seconds == Approx(2.5));
  CHECK(plan_text(plan) == "2 x 2 of 10 2 layers");
  CHECK(layer_holders({2, 2, {2, 1}}) == std::vector<Numbers>{{0, 2}, {0, 2}, {1, 3}});
  CHECK(layer_holders({1, 3, {2}}) == std::vector<Numbers>{{0, 1, 2}, {0, 1, 2}});
}

TEST_CASE("an elastic plan follows given costs, ranks and bytes") {
  ElasticPlanRequest request = request_of({8, 4}, 4);
  request.costs = {4, 4, 4, 4, 1, 1, 1, 1};
  CHECK(elastic_plan(request).ranks_per_pipeline == 1);
  request.frozen_costs = {3, 3, 3, 3, 9, 9, 9, 9};  // those of trained layers do not count
  CHECK(elastic_plan(request) == ElasticPlan{4, 1, {2, 2, 2, 2}});
  request.frozen_costs.clear();
  request.memory.assign(8, 10);
  request.limit = 39;
  CHECK(elastic_plan(request).ranks_per_pipeline == 4);  // 80 bytes do not fit into two
  request.limit = 70;
  CHECK(elastic_plan(request).ranks_per_pipeline == 2);
  request = request_of({8, 4}, 0);
  request.first = 2;
  CHECK(elastic_plan(request) == ElasticPlan{2, 2, {4, 4}});
  request.frozen = 8;
  request.before = 4;
  CHECK(elastic_plan(request).ranks_per_pipeline == 1);
}

TEST_CASE("frozen layers that a cache serves are not cut") {
  ElasticPlanRequest request = request_of({6, 4, 0.0, true}, 4);
  request.costs = {1, 1, 1, 1, 8, 8};
  // Three layers are left, which four ranks cannot have.
  CHECK(elastic_plan(request) == ElasticPlan{2, 2, {5, 1}});
  request.frozen = 6;
  CHECK(elastic_plan(request) == ElasticPlan{1, 4, {6}});
}

TEST_CASE("an elastic plan is refused with its numbers") {
  ElasticPlanRequest request = request_of({8, 4}, 9);
  CHECK_THROWS_WITH(elastic_plan(request), Contains("got 9 frozen layers of 8"));
  request = request_of({8, 4}, 0);
  request.first = 3;
  CHECK_THROWS_WITH(elastic_plan(request),
                    Contains("got 3 ranks as first, expected a factor of 4"));
  request.first = {};
  request.before = 0;
  CHECK_THROWS_WITH(elastic_plan(request), Contains("got 0 ranks as before"));
  request = request_of({2, 4}, 0);
  CHECK_THROWS_WITH(elastic_plan(request), Contains("got 2 layers for 4 parts"));
  request = request_of({8, 4, -1.0}, 0);
  CHECK_THROWS_WITH(elastic_plan(request), Contains("got the cost -1.0"));
  request = request_of({8, 4}, 2);
  request.frozen_costs = {1, 1};
  CHECK_THROWS_WITH(elastic_plan(request), Contains("got 2 costs of frozen layers, expected 8"));
  request = request_of({8, 4}, 0);
  request.memory.assign(8, 10);
  request.limit = 15;
  CHECK_THROWS_WITH(elastic_plan(request), Contains("expected at least 8 parts"));
  request = request_of({8, 0}, 0);
  CHECK_THROWS_WITH(elastic_plan(request), Contains("got 0 ranks"));
}

}  // namespace trireme::elastic_plan_test
