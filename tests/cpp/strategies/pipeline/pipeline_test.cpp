#include <trireme/strategies/pipeline/pipeline.h>

#include <torch/nn.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim.h>

#include <algorithm>
#include <atomic>
#include <catch_torch.h>
#include <chrono>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread_ranks.h>
#include <vector>

#include "strategies/pipeline/losses.h"

namespace trireme::pipeline_test {

using test::Engine;
using test::run_thread_ranks;
using test::ThreadRank;

std::mutex seed_mutex;

torch::nn::Sequential seeded_net() {
  const std::lock_guard<std::mutex> lock(seed_mutex);
  torch::manual_seed(3);
  return torch::nn::Sequential(torch::nn::Linear(4, 7), torch::nn::Tanh(), torch::nn::Linear(7, 5),
                               torch::nn::ReLU(), torch::nn::Linear(5, 3));
}

at::Tensor rows(int64_t step) {
  return at::sin(at::arange(44, at::kDouble).view({11, 4}) * double(step + 1)).to(at::kFloat);
}
at::Tensor targets(int64_t step) { return at::arange(step, step + 11).remainder(3); }
at::Tensor loss_of(const at::Tensor& scores, const at::Tensor& target) {
  return torch::nn::functional::cross_entropy(scores, target);
}

constexpr int64_t kChunks = 4;
constexpr int64_t kSteps = 5;

// Trains in one process, micro-batch by micro-batch; returns losses and parameters.
std::vector<at::Tensor> train_alone() {
  torch::nn::Sequential net = seeded_net();
  torch::optim::AdamW optimizer(net->parameters());
  std::vector<at::Tensor> found;
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const auto inputs = rows(step).tensor_split(kChunks);
    const auto wanted = targets(step).tensor_split(kChunks);
    std::vector<at::Tensor> losses;
    for (size_t i = 0; i < inputs.size(); ++i) {
      losses.push_back(loss_of(net->forward(inputs[i]), wanted[i]));
      losses.back().backward();
      losses.back() = losses.back().detach();
    }
    for (const at::Tensor& parameter : net->parameters()) parameter.grad().div_(kChunks);
    optimizer.step();
    found.push_back(test::mean_of(losses));
  }
  for (const auto& parameter : net->named_parameters()) found.push_back(parameter.value().detach());
  return found;
}

TEST_CASE("a Sequential trains as a pipeline as it does alone") {
  const std::vector<at::Tensor> alone = train_alone();
  const auto names = seeded_net()->named_parameters().keys();
  for (const char* schedule : {"gpipe", "1f1b"}) {
    for (const int64_t ranks : {1, 2, 3}) {
      std::mutex mutex;
      std::vector<std::string> wrong;
      run_thread_ranks(
          ranks,
          [&](ThreadRank& rank) {
            torch::nn::Sequential net = seeded_net();
            Pipeline<> pipe(net, rank.communicator,
                            PipelineOptions{.chunks = kChunks, .schedule = schedule});
            torch::optim::AdamW optimizer(pipe->parameters());
            std::vector<std::string> here;
            for (int64_t step = 0; step < kSteps; ++step) {
              optimizer.zero_grad();
              const at::Tensor loss = pipe->step(rows(step), targets(step), loss_of);
              optimizer.step();
              if (!loss.equal(alone[static_cast<size_t>(step)]))
                here.push_back("loss of step " + std::to_string(step));
            }
            for (const auto& parameter : pipe->named_parameters()) {
              const auto place = std::find(names.begin(), names.end(), parameter.key());
              const auto index = static_cast<size_t>(kSteps + (place - names.begin()));
              if (place == names.end() || !parameter.value().equal(alone[index]))
                here.push_back(parameter.key());
            }
            const at::Tensor scores = pipe->eval_step(rows(0));
            const bool is_last = rank.where.rank + 1 == rank.where.world;
            if (scores.defined() != is_last || (is_last && scores.size(0) != 11))
              here.push_back("outputs of an evaluation");
            const std::lock_guard<std::mutex> lock(mutex);
            wrong.insert(wrong.end(), here.begin(), here.end());
          },
          std::chrono::seconds(30), Engine::kShm);
      CAPTURE(schedule, ranks);
      CHECK(wrong.empty());
    }
  }
}

TEST_CASE("a rank keeps no layers of other ranks once the net is dropped") {
  std::atomic<int> as_many{0};
  run_thread_ranks(
      3,
      [&](ThreadRank& rank) {
        torch::nn::Sequential net = seeded_net();
        std::vector<std::weak_ptr<torch::nn::Module>> layers;
        for (const auto& layer : net->children()) layers.push_back(layer);
        Pipeline<> pipe(net, rank.communicator, PipelineOptions{.chunks = kChunks});
        net = nullptr;
        const auto alive = std::count_if(layers.begin(), layers.end(),
                                         [](const auto& layer) { return !layer.expired(); });
        if (alive == static_cast<int64_t>(pipe->children().size())) ++as_many;
        pipe->step(rows(0), targets(0), loss_of);
      },
      std::chrono::seconds(30), Engine::kShm);
  CHECK(as_many == 3);
}

TEST_CASE("gradients of all stages are clipped by their common norm") {
  torch::nn::Sequential net = seeded_net();
  loss_of(net->forward(rows(0)), targets(0)).backward();
  std::map<std::string, at::Tensor> expected;
  const double norm = torch::nn::utils::clip_grad_norm_(net->parameters(), 0.01);
  for (const auto& item : net->named_parameters()) expected[item.key()] = item.value().grad();
  std::mutex mutex;
  std::vector<std::string> wrong;
  run_thread_ranks(
      3,
      [&](ThreadRank& rank) {
        Pipeline<> pipe(seeded_net(), rank.communicator, PipelineOptions{.balance = {1, 1, 3}});
        pipe->step(rows(0), targets(0), loss_of);
        const double found = pipe->clip_grad_norm_(0.01).item<double>();
        const std::lock_guard<std::mutex> lock(mutex);
        if (std::abs(found - norm) > 1e-5 * norm) wrong.push_back(std::to_string(found));
        for (const auto& item : pipe->named_parameters())
          if (!item.value().grad().allclose(expected.at(item.key()), 1e-4, 1e-8))
            wrong.push_back(item.key());
      },
      std::chrono::seconds(30), Engine::kShm);
  CAPTURE(wrong, norm);
  CHECK(wrong.empty());
}

// Returns what each rank's error says.
template <typename Run>
std::vector<std::string> refusals(int64_t world, Run run) {
  std::vector<std::string> texts(static_cast<size_t>(world));
  run_thread_ranks(
      world,
      [&](ThreadRank& rank) {
        try {
          run(rank);
        } catch (const c10::ValueError& error) {
          texts[static_cast<size_t>(rank.where.rank)] = error.what_without_backtrace();
        }
      },
      std::chrono::seconds(30), Engine::kShm);
  return texts;
}

TEST_CASE("bad requests are refused on all ranks") {
  const auto with = [](PipelineOptions options) {
    return [options](ThreadRank& rank) { Pipeline<>(seeded_net(), rank.communicator, options); };
  };
  for (const std::string& text : refusals(2, with({.balance = {2, 2}})))
    CHECK_THAT(text, Catch::Contains("balance of [2, 2] for 5 layers and 2 stages"));
  for (const std::string& text : refusals(2, with({.schedule = "2f2b"})))
    CHECK_THAT(text, Catch::Contains("2f2b") && Catch::Contains("zb-auto"));
  for (const std::string& text : refusals(2, with({.chunks = 3, .schedule = "0F0,0B0\n1F0,1B0\n"})))
    CHECK_THAT(text, Catch::Contains("1 micro-batches"));

  const auto few = refusals(2, [](ThreadRank& rank) {
    Pipeline<> pipe(seeded_net(), rank.communicator, PipelineOptions{.chunks = 12});
    pipe->step(rows(0), targets(0), loss_of);
  });
  for (const std::string& text : few)
    CHECK_THAT(text, Catch::Contains("batch of 11 rows") && Catch::Contains("12 micro-batches"));

  const auto uneven = refusals(2, [](ThreadRank& rank) {
    Pipeline<> pipe(seeded_net(), rank.communicator, PipelineOptions{.chunks = 2});
    const int64_t count = 11 - rank.where.rank;
    pipe->step(rows(0).narrow(0, 0, count), targets(0).narrow(0, 0, count), loss_of);
  });
  for (const std::string& text : uneven)
    CHECK_THAT(text, Catch::Contains("10 rows, expected 11 rows as on rank 0"));
}

}  // namespace trireme::pipeline_test
