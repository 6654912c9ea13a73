#include <trireme/strategies/pipeline/pipeline_stage.h>

#include <trireme/activation/activation_cache.h>
#include <trireme/activation/cached_prefix.h>

#include <torch/nn.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim.h>

#include <catch_torch.h>
#include <memory>
#include <mutex>
#include <string>
#include <thread_ranks.h>
#include <tuple>
#include <vector>

#include "strategies/pipeline/losses.h"

namespace trireme::pipeline_stage_test {

using test::Engine;
using test::run_thread_ranks;
using test::ThreadRank;
using Two = std::tuple<at::Tensor, at::Tensor>;
using Tensors = std::vector<at::Tensor>;

// Four modules, whose forwards hand on tensors in different ways.
struct OpensImpl : torch::nn::Module {
  OpensImpl() { register_module("linear", linear); }
  Two forward(at::Tensor x, const at::Tensor& y) {
    stash("x", x);
    return {linear(x).tanh(), y * 2};
  }
  torch::nn::Linear linear{4, 6};
};
struct MixesImpl : torch::nn::Module {
  MixesImpl() { register_module("linear", linear); }
  Tensors forward(const at::Tensor& x, at::Tensor&& y) const {
    return {linear->weight.matmul(x.t()).t(), y, x};
  }
  torch::nn::Linear linear{6, 5};
};
struct SumsImpl : torch::nn::Module {
  SumsImpl() { register_module("linear", linear); }
  Two forward(const Tensors& all) {
    return {linear(all.at(0)).tanh(), all.at(1).sum(1, true) + all.at(2).mean(1, true)};
  }
  torch::nn::Linear linear{5, 4};
};
struct EndsImpl : torch::nn::Module {
  EndsImpl() { register_module("linear", linear); }
  at::Tensor forward(Two both) { return linear(std::get<0>(both) + pop("x")) * std::get<1>(both); }
  torch::nn::Linear linear{4, 3};
};
TORCH_MODULE(Opens);
TORCH_MODULE(Mixes);
TORCH_MODULE(Sums);
TORCH_MODULE(Ends);

std::mutex seed_mutex;

// A rank makes one stage, or all of them: the values are the same.
PipelineStage make_stage(int64_t number) {
  const std::lock_guard<std::mutex> lock(seed_mutex);
  torch::manual_seed(100 + number);
  const PipelineStageOptions options{.stage = number, .stages = 4};
  if (number == 0) return {Opens(), options};
  if (number == 1) return {Mixes(), options};
  if (number == 2) return {std::make_shared<SumsImpl>(), options};
  return {Ends(), options};
}

at::Tensor rows(int64_t step) {
  return at::sin(at::arange(44, at::kDouble).view({11, 4}) * double(step + 1)).to(at::kFloat);
}
at::Tensor targets(int64_t step) { return at::arange(step, step + 11).remainder(3); }
at::Tensor loss_of(const at::Tensor& scores, const at::Tensor& target) {
  return torch::nn::functional::cross_entropy(scores, target);
}

constexpr int64_t kChunks = 4;
constexpr int64_t kSteps = 3;

struct Trained {
  Tensors losses;
  std::map<std::string, at::Tensor> parameters;
  at::Tensor norm;
  at::Tensor outputs;
};

Trained train_alone() {
  std::vector<PipelineStage> stages;
  Trained trained;
  std::vector<at::Tensor> parameters;
  for (int64_t stage = 0; stage < 4; ++stage) {
    stages.push_back(make_stage(stage));
    for (const auto& item : stages.back().module().module->named_parameters()) {
      trained.parameters["stage" + std::to_string(stage) + "." + item.key()] = item.value();
      parameters.push_back(item.value());
    }
  }
  const auto forward = [&](Tensors values) {
    for (const PipelineStage& stage : stages) values = stage.module().forward(std::move(values));
    return values.at(0);
  };
  torch::optim::SGD optimizer(parameters, 0.1);
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const auto first = rows(step).tensor_split(kChunks);
    const auto second = rows(step + 7).tensor_split(kChunks);
    const auto wanted = targets(step).tensor_split(kChunks);
    Tensors losses;
    for (size_t i = 0; i < first.size(); ++i) {
      losses.push_back(loss_of(forward({first[i], second[i]}), wanted[i]));
      losses.back().backward();
      losses.back() = losses.back().detach();
    }
    for (const at::Tensor& parameter : parameters)
      if (parameter.grad().defined()) parameter.grad().div_(kChunks);
    optimizer.step();
    trained.losses.push_back(test::mean_of(losses));
  }
  trained.norm = at::scalar_tensor(torch::nn::utils::clip_grad_norm_(parameters, 1e9));
  const at::NoGradGuard no_grad;
  trained.outputs = forward({rows(0), rows(7)});
  return trained;
}

// Trains the stages of this rank; returns what differs.
std::vector<std::string> train(ThreadRank& rank, const std::string& schedule,
                               const std::vector<int64_t>& own, const Trained& alone) {
  std::vector<PipelineStage> stages;
  for (const int64_t stage : own) stages.push_back(make_stage(stage));
  PipelineOptions options{.chunks = kChunks, .schedule = schedule};
  options.skips = {{"x", 0, 3}};
  StagePipeline pipe(std::move(stages), rank.communicator, options);
  std::vector<std::string> wrong;
  torch::optim::SGD optimizer(pipe->parameters(), 0.1);
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = pipe->step({rows(step), rows(step + 7)}, targets(step), loss_of);
    if (!loss.equal(alone.losses[static_cast<size_t>(step)])) wrong.push_back("loss");
    optimizer.step();
  }
  for (const auto& item : pipe->named_parameters()) {
    const auto expected = alone.parameters.find(item.key());
    if (expected == alone.parameters.end() || !item.value().equal(expected->second))
      wrong.push_back(item.key());
  }
  if (!pipe->clip_grad_norm_(1e9).to(at::kDouble).allclose(alone.norm.to(at::kDouble)))
    wrong.push_back("norm");
  if (pipe->last_step().stages.size() != own.size()) wrong.push_back("report");
  const Tensors outputs = pipe->eval_step({rows(0), rows(7)});
  const bool is_last = own.back() == 3;
  if (outputs.size() != (is_last ? 1 : 0) || (is_last && !outputs[0].allclose(alone.outputs)))
    wrong.push_back("outputs");
  return wrong;
}

TEST_CASE("stages that ranks make singly train as they do in one process") {
  const Trained alone = train_alone();
  struct Case {
    std::string schedule;
    std::vector<std::vector<int64_t>> stages;  // each rank has some
  };
  const std::vector<std::vector<int64_t>> loop{{0, 2}, {1, 3}}, v{{0, 3}, {1, 2}};
  const std::vector<std::vector<int64_t>> single{{0}, {1}, {2}, {3}};
  for (const Case& scenario : std::vector<Case>{{"gpipe", single},
                                                {"1f1b", single},
                                                {"interleaved-1f1b", {{0, 1, 2, 3}}},
                                                {"interleaved-1f1b", loop},
                                                {"looped-bfs", loop},
                                                {"zb-h1", loop},
                                                {"zb-v", v},
                                                {"dualpipe-v", v}}) {
    std::mutex mutex;
    std::vector<std::string> wrong;
    run_thread_ranks(
        static_cast<int64_t>(scenario.stages.size()),
        [&](ThreadRank& rank) {
          const auto own = scenario.stages[static_cast<size_t>(rank.where.rank)];
          const auto here = train(rank, scenario.schedule, own, alone);
          const std::lock_guard<std::mutex> lock(mutex);
          wrong.insert(wrong.end(), here.begin(), here.end());
        },
        std::chrono::seconds(30), Engine::kShm);
    CAPTURE(scenario.schedule, scenario.stages.size(), wrong);
    CHECK(wrong.empty());
  }
}

TEST_CASE("modules of torch are stages, and a loss may take all outputs") {
  std::mutex mutex;
  std::vector<std::string> wrong;
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        const PipelineStageOptions options{.stage = rank.where.rank, .stages = 2};
        std::vector<PipelineStage> stages;
        if (rank.where.rank == 0) stages.emplace_back(torch::nn::Linear(4, 4), options);
        if (rank.where.rank == 1)
          stages.emplace_back(torch::nn::Sequential(torch::nn::Tanh(), torch::nn::Linear(4, 3)),
                              options);
        StagePipeline pipe(std::move(stages), rank.communicator, PipelineOptions{.chunks = 2});
        const auto loss = [](const Tensors& outputs, const at::Tensor& target) {
          return loss_of(outputs.at(0), target);
        };
        const at::Tensor trained = pipe->step(rows(0), targets(0), loss);
        const at::Tensor evaluated = pipe->eval_step(rows(0), targets(0), loss_of);
        const std::lock_guard<std::mutex> lock(mutex);
        if (!trained.equal(evaluated)) wrong.push_back("loss");
        if (!pipe->parameters()[0].grad().defined()) wrong.push_back("gradient");
      },
      std::chrono::seconds(30), Engine::kShm);
  CAPTURE(wrong);
  CHECK(wrong.empty());
}

// Returns what each rank's error says.
template <typename Run>
std::vector<std::string> refusals(const Run& run) {
  std::vector<std::string> texts(2);
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        try {
          run(rank);
        } catch (const c10::Error& error) {
          texts[static_cast<size_t>(rank.where.rank)] = error.what_without_backtrace();
        }
      },
      std::chrono::seconds(30), Engine::kShm);
  return texts;
}

TEST_CASE("stages that do not fit are refused on all ranks") {
  const auto with = [](std::vector<PipelineStageOptions> of_ranks, PipelineOptions options) {
    return refusals([of_ranks, options](ThreadRank& rank) {
      const auto& own = of_ranks[static_cast<size_t>(rank.where.rank)];
      StagePipeline({PipelineStage(torch::nn::Linear(4, 4), own)}, rank.communicator, options);
    });
  };
  for (const std::string& text : with({{0, 2}, {0, 2}}, {}))
    CHECK_THAT(text, Catch::Contains("got stages [0], expected [1] by the schedule"));
  for (const std::string& text : with({{0, 2}, {1, 3}}, {}))
    CHECK_THAT(text, Catch::Contains("got stage 1 of 3, expected it of 2"));
  for (const std::string& text : with({{0, 2}, {1, 2}}, {.balance = {1, 1}}))
    CHECK_THAT(text, Catch::Contains("got a balance of [1, 1] beside stages that are cut"));

  const auto many = refusals([](ThreadRank& rank) {
    const PipelineStageOptions options{.stage = rank.where.rank, .stages = 2};
    StagePipeline pipe({PipelineStage(torch::nn::Linear(4, 4), options)}, rank.communicator,
                       PipelineOptions{.chunks = 1});
    pipe->step({rows(0), rows(1)}, targets(0), loss_of);
  });
  CHECK_THAT(many[0], Catch::Contains("got 2 tensors, expected 1 as the forward takes"));
  CHECK_FALSE(many[1].empty());
}

// Frozen layers, the same on all ranks, then a stage that is trained.
torch::nn::Sequential frozen_front() {
  torch::nn::Sequential front(torch::nn::Linear(4, 6), torch::nn::Tanh());
  for (at::Tensor& parameter : front->parameters()) {
    parameter.set_requires_grad(false);
    parameter.copy_(at::sin(at::arange(parameter.numel())).view_as(parameter));
  }
  return front;
}

torch::nn::Linear trained_end() {
  torch::nn::Linear end(6, 3);
  const at::NoGradGuard no_grad;
  for (at::Tensor& parameter : end->parameters())
    parameter.copy_(at::cos(at::arange(parameter.numel())).view_as(parameter));
  return end;
}

TEST_CASE("a CachedPrefix is the first stage, which takes the ids of its micro-batch") {
  torch::nn::Linear alone = trained_end();
  torch::nn::Sequential front = frozen_front();
  torch::optim::SGD optimizer(alone->parameters(), 0.1);
  Tensors losses;
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = loss_of(alone(front->forward(rows(0))), targets(0));
    loss.backward();
    optimizer.step();
    losses.push_back(loss.detach());
  }
  std::vector<std::string> wrong;
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        const auto cache = std::make_shared<ActivationCache>(11, 1 << 16, rank.communicator);
        const PipelineStageOptions options{.stage = rank.where.rank, .stages = 2};
        std::vector<PipelineStage> own;
        if (rank.where.rank == 0)
          own.emplace_back(CachedPrefix(frozen_front(), cache, /*always=*/true), options);
        else
          own.emplace_back(trained_end(), options);
        StagePipeline pipe(own, rank.communicator, PipelineOptions{.chunks = 1});
        torch::optim::SGD stepped({at::zeros({1}, at::requires_grad())}, 0.1);
        if (rank.where.rank == 1)
          stepped.add_param_group(torch::optim::OptimizerParamGroup(pipe->parameters()));
        for (int64_t step = 0; step < kSteps; ++step) {
          stepped.zero_grad();
          const at::Tensor loss = pipe->step({rows(0), at::arange(11)}, targets(0), loss_of);
          stepped.step();
          if (rank.where.rank == 1 && !loss.allclose(losses[static_cast<size_t>(step)]))
            wrong.push_back("loss");
        }
        if (rank.where.rank == 0 && cache->stats().hits != 11 * (kSteps - 1))
          wrong.push_back(c10::str(cache->stats().hits, " hits"));
      },
      std::chrono::seconds(30), Engine::kShm);
  CHECK(wrong == std::vector<std::string>{});
}

}  // namespace trireme::pipeline_stage_test
