#include <trireme/activation/checkpoint_frame.h>
#include <trireme/strategies/pipeline/pipeline.h>
#include <trireme/strategies/pipeline/schedule_costs.h>
#include <trireme/strategies/pipeline/schedule_recomputation.h>
#include <trireme/strategies/pipeline/schedule_text.h>

#include <torch/nn.h>

#include <catch_torch.h>
#include <string>
#include <thread_ranks.h>
#include <vector>

#include "strategies/pipeline/losses.h"
#include "strategies/pipeline/tables.h"

namespace trireme::recomputation_test {

using Catch::Matchers::Contains;
using test::Engine;
using test::make_form;
using test::row_of;
using test::run_thread_ranks;
using test::ThreadRank;

PipelineSchedule recomputed(const std::string& form, Recomputation which, int64_t ranks = 2,
                            int64_t micro_batches = 3) {
  return with_recomputation(make_form(form, ranks, micro_batches), which);
}

TEST_CASE("an R stands in front of the backwards that ask for it") {
  CHECK(recomputed("gpipe", Recomputation::kNever) == make_form("gpipe", 2, 3));
  CHECK(row_of(recomputed("gpipe", Recomputation::kAlways), 0) ==
        "0F0 0F1 0F2 0R0 0B0 0R1 0B1 0R2 0B2");
  CHECK(row_of(recomputed("gpipe", Recomputation::kExceptLast), 1) ==
        "1F0 1F1 1F2 1R0 1B0 1R1 1B1 1B2");
  // The last stage goes back at once: an R there would free nothing.
  CHECK(row_of(recomputed("1f1b", Recomputation::kAuto), 0) ==
        "0F0 0F1 0R0 0B0 0F2 0R1 0B1 0R2 0B2");
  CHECK(row_of(recomputed("1f1b", Recomputation::kAuto), 1) == "1F0 1B0 1F1 1B1 1F2 1B2");
  CHECK(row_of(recomputed("zb-h1", Recomputation::kAlways, 2, 1), 0) == "0F0 0R0 0I0 0W0");
}

TEST_CASE("tables with R are read, written, lowered and checked") {
  for (const char* form : {"gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-v",
                           "dualpipe-v", "zb-auto"}) {
    const PipelineSchedule schedule = recomputed(form, Recomputation::kAlways, 3, 7);
    CAPTURE(form);
    CHECK(schedule_from_csv(to_csv(schedule, TableForm::kComputeOnly)) == schedule);
    CHECK_NOTHROW(schedule_from_csv(to_csv(schedule, TableForm::kComputeComms)));
  }
  CHECK_THROWS_WITH(
      with_recomputation(recomputed("1f1b", Recomputation::kAuto), Recomputation::kAlways),
      Contains("got a table with R"));
  CHECK_THROWS_WITH(recomputation("often"), Contains("got checkpoint='often', expected 'always'"));
  CHECK_THROWS_WITH(schedule_from_csv("0F0,0B0,0R0"), Contains("0R0 has no backward behind it"));
}

TEST_CASE("an R takes the time of a forward, and hides in a bubble") {
  // Rank 0 waits for the gradient from rank 1 while it recomputes.
  CHECK(makespan(recomputed("1f1b", Recomputation::kAuto, 2, 1)) ==
        makespan(make_form("1f1b", 2, 1)));
  CHECK(makespan(recomputed("gpipe", Recomputation::kAlways, 1, 4)) == 4 * (1 + 1 + 2));
}

TEST_CASE("what is recomputed is live from R on") {
  for (int64_t rank = 0; rank < 3; ++rank) {
    CHECK(peak_activations(recomputed("gpipe", Recomputation::kAlways, 3, 6), rank) == 1);
    CHECK(peak_activations(recomputed("gpipe", Recomputation::kExceptLast, 3, 6), rank) == 2);
    CHECK(peak_activations(recomputed("1f1b", Recomputation::kAuto, 3, 6), rank) == 1);
  }
}

// Draws other numbers with every call, and changes its input in place if it is told to.
struct DroppingImpl : torch::nn::Module {
  explicit DroppingImpl(bool works_in_place) : in_place(works_in_place) {}
  at::Tensor forward(at::Tensor values) {
    if (in_place) values.mul_(2);
    ++(is_recomputing() ? repeated : called);
    if (is_checkpointing()) ++checkpointed;
    return at::dropout(at::tanh(values), 0.5, is_training());
  }
  bool in_place;
  int64_t called = 0;
  int64_t checkpointed = 0;
  int64_t repeated = 0;
};
TORCH_MODULE(Dropping);

torch::nn::Sequential net_of(bool works_in_place = false) {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(4, 4), Dropping(false), Dropping(works_in_place),
                               torch::nn::Linear(4, 4));
}

at::Tensor mean_square(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).square().mean();
}

TEST_CASE("a recomputation draws the random numbers of its forward") {
  for (const char* form : {"gpipe", "1f1b", "zb-h1"}) {
    std::vector<std::vector<at::Tensor>> found;
    for (const char* checkpoint : {"never", "always"}) {
      run_thread_ranks(
          1,
          [&](ThreadRank& rank) {
            torch::nn::Sequential net = net_of();
            Pipeline<> pipe(
                net, rank.communicator,
                PipelineOptions{.chunks = 3, .schedule = form, .checkpoint = checkpoint});
            torch::manual_seed(7);
            const at::Tensor x = at::arange(24, at::kFloat).view({6, 4}) * 0.1;
            pipe->step(x, x, mean_square);
            auto& gradients = found.emplace_back();
            for (const at::Tensor& parameter : pipe->parameters())
              gradients.push_back(parameter.grad().clone());
            const auto& layer = net->at<DroppingImpl>(1);
            const bool repeats = std::string(checkpoint) == "always";
            CHECK(layer.called == 3);
            CHECK(layer.checkpointed == (repeats ? 3 : 0));
            CHECK(layer.repeated == (repeats ? 3 : 0));
          },
          std::chrono::seconds(30), Engine::kShm);
    }
    CAPTURE(form);
    REQUIRE(found.size() == 2);
    for (size_t i = 0; i < found[0].size(); ++i) CHECK(found[0][i].equal(found[1][i]));
  }
}

TEST_CASE("an input that a stage changes in place is noticed, and the next step works") {
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        torch::nn::Sequential net = net_of(/*works_in_place=*/true);
        Pipeline<> pipe(net, rank.communicator,
                        PipelineOptions{.chunks = 2, .balance = {2, 2}, .checkpoint = "always"});
        const at::Tensor x = at::ones({4, 4});
        CHECK_THROWS_WITH(
            pipe->step(x, x, mean_square),
            Contains(
                "the recomputation of micro-batch 0 of stage 1 (layers 2..3) raised in step 1") &&
                Contains("got an input of stage 1 (layers 2..3) that was changed in "
                         "place before it is recomputed"));
        for (const at::Tensor& parameter : pipe->parameters()) CHECK(!parameter.grad().defined());
        if (rank.where.rank == 1) net->at<DroppingImpl>(2).in_place = false;
        CHECK(pipe->step(x, x, mean_square).item<double>() > 0);
      },
      std::chrono::seconds(30), Engine::kShm);
}

}  // namespace trireme::recomputation_test
