#include <trireme/strategies/pipeline/gradients/tied_parameters.h>

#include <trireme/strategies/pipeline/pipeline.h>
#include <trireme/strategies/pipeline/schedule_forms.h>

#include <torch/nn.h>
#include <torch/nn/utils/clip_grad.h>

#include <catch_torch.h>
#include <cmath>
#include <map>
#include <mutex>
#include <string>
#include <thread_ranks.h>
#include <vector>

namespace trireme::tied_parameters_test {

using test::Engine;
using test::run_thread_ranks;
using test::ThreadRank;

constexpr int64_t kChunks = 3;

// Has one Linear as its first, middle and last layer.
torch::nn::Sequential net() {
  torch::nn::Linear layer(5, 5);
  const at::NoGradGuard no_grad;
  layer->weight.copy_(at::sin(at::arange(25, at::kDouble)).view({5, 5}));
  layer->bias.fill_(0.25);
  return torch::nn::Sequential(layer, torch::nn::Tanh(), layer, torch::nn::Tanh(), layer);
}
at::Tensor rows() { return at::cos(at::arange(35, at::kDouble)).view({7, 5}).to(at::kFloat); }
at::Tensor loss_of(const at::Tensor& output, const at::Tensor& target) {
  return torch::mse_loss(output, target);
}

struct Alone {
  at::Tensor weight_gradient;
  double norm = 0;
  at::Tensor clipped;
};

Alone train_alone() {
  torch::nn::Sequential whole = net();
  for (const at::Tensor& x : rows().tensor_split(kChunks)) loss_of(whole->forward(x), x).backward();
  std::vector<at::Tensor> each;
  for (const at::Tensor& parameter : whole->children()[0]->parameters()) {
    parameter.grad().div_(kChunks);
    each.push_back(parameter);
  }
  Alone alone;
  alone.weight_gradient = each[0].grad().clone();
  alone.norm = torch::nn::utils::clip_grad_norm_(each, 0.01);
  alone.clipped = each[0].grad().clone();
  return alone;
}

TEST_CASE("copies of one parameter get one gradient, which counts once") {
  const Alone alone = train_alone();
  for (const char* schedule : {"gpipe", "1f1b", "zb-h1"}) {
    for (const int64_t ranks : {1, 2, 3}) {
      std::mutex mutex;
      std::vector<at::Tensor> found;
      std::vector<std::string> wrong;
      run_thread_ranks(
          ranks,
          [&](ThreadRank& rank) {
            torch::nn::Sequential own = net();
            if (rank.where.rank > 0) {  // the values of the first stage's rank are everybody's
              const at::NoGradGuard no_grad;
              own->children()[0]->parameters()[0].zero_();
            }
            Pipeline<> pipe(own, rank.communicator,
                            PipelineOptions{.chunks = kChunks, .schedule = schedule});
            pipe->step(rows(), rows(), loss_of);
            const at::Tensor weight = pipe->parameters()[0];
            const at::Tensor gradient = weight.grad().clone();
            const double norm = pipe->clip_grad_norm_(0.01).item<double>();
            const std::lock_guard<std::mutex> lock(mutex);
            if (!gradient.allclose(alone.weight_gradient, 1e-4, 1e-6)) wrong.push_back("gradient");
            if (std::abs(norm - alone.norm) > 1e-5 * norm) wrong.push_back(std::to_string(norm));
            if (!weight.grad().allclose(alone.clipped, 1e-4, 1e-7)) wrong.push_back("clipped");
            found.push_back(gradient);
          },
          std::chrono::seconds(30), Engine::kShm);
      CAPTURE(schedule, ranks, wrong);
      CHECK(wrong.empty());
      for (const at::Tensor& gradient : found) CHECK(gradient.equal(found.front()));
    }
  }
}

TEST_CASE("tied parameters are found by identity, once per rank") {
  const at::Tensor a = at::zeros({2});
  const at::Tensor b = at::zeros({2});
  const auto tied = find_tied(
      {{0, {"0.a", "0.again", "0.b"}, {a, a, b}}, {1, {"1.a"}, {a}}, {0, {"2.b", "2.a"}, {b, a}}});
  REQUIRE(tied.size() == 1);
  REQUIRE(tied[0].holders.size() == 2);
  CHECK(tied[0].holders[0].stage == 0);
  CHECK(tied[0].holders[0].name == "0.a");
  CHECK(tied[0].holders[1].stage == 1);
  CHECK(tied[0].holders[1].name == "1.a");
}

// Returns what each of two ranks says of holders, where both name these and have these parameters.
std::vector<std::string> refusals(const std::vector<TiedParameter>& tied,
                                  const std::vector<NamedParameters>& parameters) {
  std::vector<std::string> texts(2);
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        const auto place = static_cast<size_t>(rank.where.rank);
        try {
          const PipelineSchedule schedule =
              pipeline_schedule({.name = "gpipe", .ranks = 2, .micro_batches = 1});
          TiedParameters own(schedule, tied, *rank.communicator);
          own.set_parameters(rank.where.rank, parameters[place]);
          own.spread_values();
        } catch (const c10::ValueError& error) {
          texts[place] = error.what_without_backtrace();
        }
      },
      std::chrono::seconds(30), Engine::kShm);
  return texts;
}

TEST_CASE("copies that differ are refused on all ranks") {
  const std::vector<TiedParameter> tied{{{{0, "a"}, {1, "b"}}}};
  const NamedParameters first{{"a"}, {at::zeros({2})}, {false}};
  const NamedParameters wide{{"b"}, {at::zeros({3})}, {false}};
  const NamedParameters twice{{"b"}, {at::zeros({2}, at::kDouble)}, {false}};
  for (const std::string& text : refusals(tied, {first, wide}))
    CHECK_THAT(text, Catch::Contains("'a' and 'b', which are one parameter, as Float [2]") &&
                         Catch::Contains("on rank 0, and as Float [3]"));
  for (const std::string& text : refusals(tied, {first, twice}))
    CHECK_THAT(text, Catch::Contains("as Double [2]"));
  for (const std::string& text : refusals(tied, {first, first}))
    CHECK_THAT(text, Catch::Contains("stage 1 without 'b', which is tied (rank 1 of 2)"));
  for (const std::string& text : refusals({{{{0, "a"}}}}, {first, first}))
    CHECK_THAT(text, Catch::Contains("'a' whose holders are not stages of several ranks"));
  for (const std::string& text : refusals({{{{1, "b"}, {0, "a"}}}}, {first, first}))
    CHECK_THAT(text, Catch::Contains("'b' whose holders are not stages of several ranks"));
}

}  // namespace trireme::tied_parameters_test
