// How the plans of a run follow each other, on threads as ranks.

#include <trireme/pipetransformer/elastic_course.h>

#include <ATen/ATen.h>

#include <catch_torch.h>
#include <memory>
#include <pipetransformer/wrong.h>
#include <string>
#include <thread_ranks.h>
#include <vector>

namespace trireme::elastic_course_test {

using namespace trireme::test;
using Catch::Contains;
using Strings = std::vector<std::string>;

namespace {

ElasticOptions options_of(int64_t layers) {
  ElasticOptions options;
  for (int64_t i = 0; i < layers; ++i) options.layers.push_back("layer" + std::to_string(i));
  options.global_batch = 32;
  options.chunks = 8;
  return options;
}

}  // namespace

TEST_CASE("an elastic run goes from plan to plan as layers freeze") {
  Wrong wrong;
  run_thread_ranks(4, [&](ThreadRank& own) {
    const int64_t rank = own.where.rank;
    ElasticCourse course(options_of(12), own.communicator);
    wrong.unless(course.needs_costs(), "costs are known");
    wrong.unless_says(text_of_error([&] { course.next_plan(0); }), "no costs of layers yet");
    // Ranks measure differently; the mean counts. A forward is half of a backward.
    const double factor = 0.5 + 0.25 * static_cast<double>(rank + 0.5);
    course.take_costs(std::vector<double>(12, factor), std::vector<double>(12, 2 * factor));
    course.adopt(course.next_plan(0), 0);
    wrong.unless(course.plan() == ElasticPlan{4, 1, {3, 3, 3, 3}}, "the first plan");
    wrong.unless(course.own_layers() == IndexRange{3 * rank, 3 * rank + 3}, "layers of 4 x 1");
    wrong.unless(course.rows() == IndexRange{0, 32} && course.micro_batches() == 8,
                 "rows of 4 x 1");
    wrong.unless(course.mean_loss(at::scalar_tensor(2.5)).item<float>() == 2.5, "one loss");
    course.end_epoch(0, 1.0 + static_cast<double>(rank), rank);
    // 9 x 1/3 + 3 = 6, as 3 + 3 in two parts, which is what the first plan has.
    course.adopt(course.next_plan(9), 9);
    wrong.unless(course.plan() == ElasticPlan{2, 2, {9, 3}}, "the second plan");
    wrong.unless(course.rows() == IndexRange{rank / 2 * 16, rank / 2 * 16 + 16} &&
                     course.micro_batches() == 4,
                 "rows of 2 x 2");
    const auto loss = at::scalar_tensor(static_cast<double>(rank / 2), at::kFloat);
    wrong.unless(course.mean_loss(loss).item<float>() == 0.5, "the mean of two losses");
    course.adopt(course.next_plan(12), 12);
    course.adopt(course.next_plan(12), 12);
    wrong.unless(course.plan().ranks_per_pipeline == 2, "12 x 1/3 is more than one part");
    wrong.unless(course.next_plan(0).ranks_per_pipeline == 4, "a larger plan");
    course.adopt({1, 4, {12}}, 12);
    wrong.unless(course.own_layers() == IndexRange{0, 12} && course.micro_batches() == 1 &&
                     course.rows() == IndexRange{8 * rank, 8 * rank + 8},
                 "rows of 1 x 4");
    course.end_epoch(12, 0.5, 1);
    const auto& history = course.history();
    wrong.unless(history.size() == 2 && history[0].seconds == 4 && history[0].hits == 6 &&
                     history[1].epoch == 1 && history[1].frozen == 12 && history[1].replicas == 4,
                 "the history");
    wrong.unless_says(course.where(), "of 4 under the plan 1 x 4 of 12 layers");
  });
  CHECK(wrong.found() == Strings{});
}

TEST_CASE("an elastic run follows its switches") {
  ElasticOptions options = options_of(12);
  options.costs.assign(12, 1.0);
  Wrong wrong;
  run_thread_ranks(4, [&](ThreadRank& own) {
    ElasticOptions cached = options;
    cached.cached = true;
    ElasticCourse course(cached, own.communicator);
    course.adopt(course.next_plan(0), 0);
    wrong.unless(course.next_plan(7) == ElasticPlan{2, 2, {9, 3}}, "the plan with a cache");
    wrong.unless_says(text_of_error([&] { course.check_batch(32, {}); }), "a batch without ids");
    ElasticOptions fixed = options;
    fixed.pipe = fixed.replicas = false;
    ElasticCourse stays(fixed, own.communicator);
    stays.adopt(stays.next_plan(0), 0);
    wrong.unless(stays.next_plan(11) == stays.plan(), "a fixed plan");
    wrong.unless_says(text_of_error([&] { stays.end_epoch(own.where.rank == 2 ? 1 : 0, 1, 0); }),
                      "ranks with other histories: 'epoch 0, frozen 0, plan 4 x 1 of 3 3 3 3 "
                      "layers' on rank 0, 'epoch 0, frozen 1");
  });
  CHECK(wrong.found() == Strings{});
}

TEST_CASE("an elastic run is refused with its numbers") {
  const auto text_for = [](const ElasticOptions& options) {
    return text_of_error([&] { ElasticCourse course(options, nullptr); });
  };
  ElasticOptions options = options_of(2);
  CHECK(text_for(options).empty());
  options.replicas = false;
  CHECK_THAT(text_for(options), Contains("pipe=True and replicas=False"));
  options = options_of(2);
  options.costs = {1, -1};
  CHECK_THAT(text_for(options), Contains("got costs [1, -1] for 2 layers"));
  options = options_of(2);
  options.chunks = 0;
  CHECK_THAT(text_for(options), Contains("got a global batch of 32 rows in 0 micro-batches"));
  options = options_of(2);
  ElasticCourse course(options, nullptr);
  CHECK_THAT(text_of_error([&] { (void)course.rows(); }), Contains("got no plan yet"));
  const auto refused = [&](const ElasticPlan& plan) {
    return text_of_error([&] { course.check_plan(plan); });
  };
  CHECK_THAT(refused({2, 1, {1, 1}}), Contains("got the plan 2 x 1 of 1 1 layers for 1 ranks"));
  CHECK_THAT(refused({1, 1, {3}}), Contains("got the plan 1 x 1 of 3 layers for 2 layers"));
  course.adopt({1, 1, {2}}, 0);
  CHECK_THAT(text_of_error([&] { course.check_batch(31, {}); }),
             Contains("got a batch of 31 rows, expected the global batch of 32 under the plan 1 x "
                      "1 of 2 layers"));
  CHECK_THAT(text_of_error([&] { course.check_batch(32, at::zeros({32})); }),
             Contains("got ids as Float of sizes [32] for 32 rows"));
}

TEST_CASE("an elastic run is refused on all ranks") {
  Wrong wrong;
  run_thread_ranks(4, [&](ThreadRank& own) {
    const auto text_for = [&](const ElasticOptions& options) {
      return text_of_error([&] { ElasticCourse course(options, own.communicator); });
    };
    wrong.unless_says(text_for(options_of(3)), "got 3 layers for 4 ranks");
    ElasticOptions options = options_of(12);
    options.chunks = own.where.rank == 3 ? 4 : 8;
    wrong.unless_says(text_for(options),
                      "ranks with other options: 'chunks=8' on rank 0, 'chunks=4' on rank 3");
    options.chunks = 3;
    wrong.unless_says(text_for(options),
                      "got a global batch of 32 rows in 3 micro-batches, which the plan 4 x 1");
    options.chunks = 1;
    wrong.unless_says(text_for(options), "which the plan 2 x 2");
    options.chunks = 2;
    options.global_batch = 30;
    wrong.unless_says(text_for(options), "which the plan 1 x 4");
  });
  CHECK(wrong.found() == Strings{});
}

}  // namespace trireme::elastic_course_test
