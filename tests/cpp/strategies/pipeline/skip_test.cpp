#include <trireme/strategies/pipeline/pipeline.h>

#include <torch/nn.h>

#include <atomic>
#include <catch_torch.h>
#include <map>
#include <mutex>
#include <string>
#include <thread_ranks.h>
#include <utility>
#include <vector>

#include "strategies/pipeline/losses.h"

namespace trireme::pipeline_skip_test {

using test::Engine;
using test::run_thread_ranks;
using test::ThreadRank;
using Tensors = std::vector<at::Tensor>;

std::mutex seed_mutex;

// Stashes what it computes, or adds what it pops, under names that may be empty.
struct BlockImpl : torch::nn::Module {
  BlockImpl(std::string stashes, std::string pops)
      : linear(register_module("linear", torch::nn::Linear(6, 6))),
        stashes(std::move(stashes)),
        pops(std::move(pops)) {}

  at::Tensor forward(at::Tensor x) {
    x = at::tanh(linear(x));
    if (!stashes.empty()) stash(stashes, x);
    if (!pops.empty()) x = x * pop(pops);
    return x;
  }

  torch::nn::Linear linear;
  std::string stashes, pops;
};
TORCH_MODULE(Block);

// The blocks of a U-Net: what comes down is popped in reverse order on the way up.
torch::nn::Sequential u_net() {
  const std::lock_guard<std::mutex> lock(seed_mutex);
  torch::manual_seed(5);
  return torch::nn::Sequential(Block("a", ""), Block("b", ""), Block("c", ""), Block("", ""),
                               Block("", "c"), Block("", "b"), Block("", "a"), Block("", ""));
}
const std::vector<PipelineSkip> kSkips{{"a", 0, 6}, {"b", 1, 5}, {"c", 2, 4}};

at::Tensor rows(int64_t step) {
  return at::sin(at::arange(66, at::kDouble).view({11, 6}) * double(step + 1)).to(at::kFloat);
}
at::Tensor loss_of(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).square().mean();
}

constexpr int64_t kChunks = 4;
constexpr int64_t kSteps = 3;

// Returns losses, and the gradients of the last step by name.
std::pair<Tensors, std::map<std::string, at::Tensor>> train_alone() {
  torch::nn::Sequential net = u_net();
  Tensors found;
  for (int64_t step = 0; step < kSteps; ++step) {
    net->zero_grad();
    Tensors losses;
    const auto inputs = rows(step).tensor_split(kChunks);
    const auto targets = rows(step + 7).tensor_split(kChunks);
    for (size_t i = 0; i < inputs.size(); ++i) {
      losses.push_back(loss_of(net->forward(inputs[i]), targets[i]));
      losses.back().backward();
      losses.back() = losses.back().detach();
    }
    found.push_back(test::mean_of(losses));
  }
  std::map<std::string, at::Tensor> gradients;
  for (const auto& item : net->named_parameters())
    gradients[item.key()] = item.value().grad().div_(kChunks);
  return {found, gradients};
}

TEST_CASE("skips go past stages, and gradients come back, under every schedule and engine") {
  const auto [losses, gradients] = train_alone();
  for (const char* schedule : {"gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-v",
                               "dualpipe-v", "zb-auto"}) {
    for (const auto& [ranks, engine] :
         {std::pair(1, Engine::kShm), {2, Engine::kShm}, {4, Engine::kShm}, {3, Engine::kGloo}}) {
      std::mutex mutex;
      std::string wrong;
      run_thread_ranks(
          ranks,
          [&](ThreadRank& rank) {
            Pipeline<> pipe(
                u_net(), rank.communicator,
                PipelineOptions{.chunks = kChunks, .schedule = schedule, .skips = kSkips});
            std::string here;
            for (int64_t step = 0; step < kSteps; ++step) {
              pipe->zero_grad();
              if (!pipe->step(rows(step), rows(step + 7), loss_of)
                       .equal(losses[static_cast<size_t>(step)]))
                here += " loss";
              pipe->eval_step(rows(step));
            }
            for (const auto& item : pipe->named_parameters())
              if (!item.value().grad().equal(gradients.at(item.key()))) here += " " + item.key();
            const std::lock_guard<std::mutex> lock(mutex);
            wrong += here;
          },
          std::chrono::seconds(30), engine);
      CAPTURE(schedule, ranks);
      CHECK(wrong == "");
    }
  }
}

// Returns what each rank's error says.
std::vector<std::string> errors_of(torch::nn::Sequential (*make)(),
                                   const std::vector<PipelineSkip>& skips) {
  std::vector<std::string> texts(2);
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        std::string& text = texts[static_cast<size_t>(rank.where.rank)];
        try {
          Pipeline<> pipe(make(), rank.communicator, PipelineOptions{.chunks = 2, .skips = skips});
          pipe->step(rows(0), rows(1), loss_of);
        } catch (const c10::Error& error) {
          text = error.what_without_backtrace();
        }
      },
      std::chrono::seconds(30), Engine::kShm);
  return texts;
}

void check_all(const std::vector<std::string>& texts, const std::string& expected) {
  for (const std::string& text : texts) CHECK_THAT(text, Catch::Contains(expected));
}

TEST_CASE("bad skips are refused where they are declared, or where they are met") {
  check_all(errors_of(u_net, {{"a", 0, 8}}), "the skip 'a' from layer 0 to layer 8, expected it");
  check_all(errors_of(u_net, {{"a", 3, 2}}), "from layer 3 to layer 2");
  check_all(errors_of(u_net, {{"a", 0, 6}, {"a", 1, 5}}), "another one of that name");
  check_all(errors_of(u_net, {{"a", 0, 6}, {"b", 1, 5}}),
            "got a stash of 'c', which is not declared of this stage");
  check_all(errors_of(u_net, {{"a", 0, 6}, {"b", 1, 5}, {"c", 2, 4}, {"d", 3, 7}}),
            "got no stash of 'd' in the forward of a stage that declares it");
  check_all(errors_of(u_net, {{"a", 0, 6}, {"b", 1, 5}, {"c", 2, 7}, {"d", 4, 4}}),
            "got no stash of 'd'");
  const auto twice =
      +[] { return torch::nn::Sequential(Block("a", ""), Block("a", ""), Block("", "a")); };
  check_all(errors_of(twice, {{"a", 0, 2}}), "got a stash of 'a' twice in a micro-batch");
  const auto popped_twice =
      +[] { return torch::nn::Sequential(Block("a", ""), Block("", "a"), Block("", "a")); };
  check_all(errors_of(popped_twice, {{"a", 0, 2}}), "got a pop of 'a'");
  const auto early = +[] { return torch::nn::Sequential(Block("", "a"), Block("a", "")); };
  check_all(errors_of(early, {{"a", 0, 0}}), "got a pop of 'a' before it was stashed");
}

TEST_CASE("ranks that declare other skips, and tables that cannot carry them, are refused") {
  std::vector<std::string> texts(2);
  const auto refused = [&](auto options_of) {
    run_thread_ranks(
        2,
        [&](ThreadRank& rank) {
          std::string& text = texts[static_cast<size_t>(rank.where.rank)];
          try {
            Pipeline<>(u_net(), rank.communicator, options_of(rank.where.rank));
            text = "nothing";
          } catch (const c10::ValueError& error) {
            text = error.what_without_backtrace();
          }
        },
        std::chrono::seconds(30), Engine::kShm);
  };
  refused([](int64_t rank) { return PipelineOptions{.skips = {{"a", 0, rank == 0 ? 6 : 2}}}; });
  check_all(texts, "'a' from stage 0 to stage 1 on rank 0");
  refused([](int64_t) {
    return PipelineOptions{
        .chunks = 2, .schedule = "0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1\n", .skips = {{"a", 0, 6}}};
  });
  check_all(texts, "run micro-batches in different orders");
}

TEST_CASE("a step in which a layer between stash and pop raised leaves nothing behind") {
  static std::atomic<bool> raises{false};
  struct RaisesImpl : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) {
      TORCH_CHECK(!raises, "the coffee is cold");
      return x;
    }
  };
  const auto make = [] {
    const std::lock_guard<std::mutex> lock(seed_mutex);
    torch::manual_seed(5);
    return torch::nn::Sequential(Block("a", ""), RaisesImpl(), Block("", "a"));
  };
  std::mutex mutex;
  std::vector<std::string> wrong;
  run_thread_ranks(
      3,
      [&](ThreadRank& rank) {
        Pipeline<> pipe(
            make(), rank.communicator,
            PipelineOptions{.chunks = kChunks, .schedule = "1f1b", .skips = {{"a", 0, 2}}});
        at::Tensor before;
        std::vector<std::string> here;
        for (const bool fails : {false, true, false, true, false}) {
          rank.communicator->barrier("test").wait();
          raises = fails;
          rank.communicator->barrier("test").wait();
          at::Tensor loss;
          std::string text;
          try {
            loss = pipe->step(rows(0), rows(1), loss_of);
          } catch (const c10::Error& error) {
            text = error.what_without_backtrace();
          }
          if (fails != (text.find("the coffee is cold") != std::string::npos))
            here.push_back("text: " + text);
          if (before.defined() && !fails && !(loss.defined() && loss.equal(before)))
            here.push_back("loss");
          if (!fails) before = loss;
        }
        const std::lock_guard<std::mutex> lock(mutex);
        wrong.insert(wrong.end(), here.begin(), here.end());
      },
      std::chrono::seconds(30), Engine::kShm);
  CAPTURE(wrong);
  CHECK(wrong.empty());
}

TEST_CASE("outside of a pipeline a name is kept until it is popped") {
  stash("a", at::ones({2}));
  stash("a", at::zeros({2}));
  CHECK(pop("a").equal(at::zeros({2})));
  CHECK_THROWS_WITH(pop("a"), Catch::Contains("got a pop of 'a', which nothing has stashed"));
}

}  // namespace trireme::pipeline_skip_test
