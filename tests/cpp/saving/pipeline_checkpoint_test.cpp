// Checkpoints of pipelines from C++: what one cut has saved another cut, and the unsplit module, go
// on with, and back, as if nothing had happened.

#include <trireme/saving/checkpoint_reader.h>
#include <trireme/saving/module_checkpoint.h>
#include <trireme/strategies/pipeline/pipeline.h>

#include <torch/nn.h>
#include <torch/optim.h>

#include <algorithm>
#include <catch_torch.h>
#include <mutex>
#include <string>
#include <temporary_folder.h>
#include <thread_ranks.h>
#include <vector>

namespace trireme::pipeline_checkpoint_test {

using test::Engine;
using test::run_thread_ranks;
using test::TemporaryFolder;
using test::ThreadRank;

namespace {

constexpr int64_t kChunks = 4;
constexpr int64_t kBreak = 2;
constexpr int64_t kSteps = 4;

std::mutex seed_mutex;

// Has buffers; with `tied` the last layer is the first one.
torch::nn::Sequential make_net(bool tied = false) {
  const std::lock_guard<std::mutex> lock(seed_mutex);
  torch::manual_seed(4);
  const torch::nn::Linear first(4, 4);
  const torch::nn::Linear last = tied ? first : torch::nn::Linear(4, 4);
  return torch::nn::Sequential(first, torch::nn::Tanh(), torch::nn::BatchNorm1d(4),
                               torch::nn::Linear(4, 4), torch::nn::Tanh(), last);
}

at::Tensor rows(int64_t step) {
  return at::sin(at::arange(48, at::kDouble).view({12, 4}) * double(step + 1)).to(at::kFloat);
}
at::Tensor loss_of(const at::Tensor& output, const at::Tensor& target) {
  return at::mse_loss(output, target);
}

// parameters() lists what hangs in two places twice.
std::vector<at::Tensor> once(const torch::nn::Module& module) {
  std::vector<at::Tensor> found;
  for (const at::Tensor& parameter : module.parameters()) {
    const auto is_one = [&](const at::Tensor& other) { return other.is_same(parameter); };
    if (std::none_of(found.begin(), found.end(), is_one)) found.push_back(parameter);
  }
  return found;
}

at::Tensor train(torch::nn::Sequential& net, torch::optim::Optimizer& optimizer, int64_t step) {
  optimizer.zero_grad();
  const auto inputs = rows(2 * step).tensor_split(kChunks);
  const auto targets = rows(2 * step + 1).tensor_split(kChunks);
  at::Tensor total = at::zeros({});
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor loss = loss_of(net->forward(inputs[i]), targets[i]);
    loss.backward();
    total += loss.detach();
  }
  for (const at::Tensor& parameter : once(*net)) parameter.grad().div_(kChunks);
  optimizer.step();
  return total / kChunks;
}
at::Tensor train(Pipeline<>& pipe, torch::optim::Optimizer& optimizer, int64_t step) {
  optimizer.zero_grad();
  const at::Tensor loss = pipe->step(rows(2 * step), rows(2 * step + 1), loss_of);
  optimizer.step();
  return loss;
}

std::vector<at::Tensor> losses_without_a_break(bool tied) {
  torch::nn::Sequential net = make_net(tied);
  torch::optim::AdamW optimizer(once(*net));
  std::vector<at::Tensor> losses;
  for (int64_t step = 0; step < kSteps; ++step) losses.push_back(train(net, optimizer, step));
  return losses;
}

// Is one run of some ranks: it loads, trains over a stretch, and saves, where a path is given.
struct Run {
  int64_t ranks = 1;
  std::string schedule = "1f1b";
  std::vector<int64_t> balance = {};
  bool is_whole = false;  // the unsplit module on rank 0's thread
};

// Returns what is wrong.
std::vector<std::string> go(const Run& run, bool tied, const std::string& load,
                            const std::string& save) {
  const std::vector<at::Tensor> expected = losses_without_a_break(tied);
  std::mutex mutex;
  std::vector<std::string> wrong;
  const auto go_on = [&](auto& net, torch::optim::Optimizer& optimizer,
                         const std::shared_ptr<Communicator>& communicator) {
    if (!load.empty()) {
      const at::NoGradGuard no_grad;
      for (const auto& tensors : {once(*net), net->buffers()})
        for (const at::Tensor& tensor : tensors) tensor.add_(1);
      load_checkpoint(load, *net, {.optimizer = &optimizer, .communicator = communicator});
    }
    const int64_t begin = load.empty() ? 0 : kBreak;
    const int64_t end = save.empty() ? kSteps : kBreak;
    for (int64_t step = begin; step < end; ++step) {
      const at::Tensor loss = [&] {
        const at::AutoGradMode with_grad(true);
        return train(net, optimizer, step);
      }();
      if (!at::allclose(loss, expected[static_cast<size_t>(step)], 1e-5, 1e-6)) {
        const std::lock_guard<std::mutex> lock(mutex);
        wrong.push_back("loss of step " + std::to_string(step));
      }
    }
    if (!save.empty())
      save_checkpoint(save, *net, {.optimizer = &optimizer, .communicator = communicator});
  };
  run_thread_ranks(
      run.ranks,
      [&](ThreadRank& rank) {
        if (run.is_whole) {
          torch::nn::Sequential net = make_net(tied);
          torch::optim::AdamW optimizer(once(*net));
          return go_on(net, optimizer, rank.communicator);
        }
        Pipeline<> pipe(
            make_net(tied), rank.communicator,
            PipelineOptions{.chunks = kChunks, .balance = run.balance, .schedule = run.schedule});
        torch::optim::AdamW optimizer(once(*pipe));
        go_on(pipe, optimizer, nullptr);
      },
      std::chrono::seconds(60), Engine::kShm);
  return wrong;
}

}  // namespace

TEST_CASE("another cut and the unsplit module go on where a pipeline stopped, and back") {
  const std::vector<Run> runs = {{.ranks = 2},
                                 {.ranks = 3, .schedule = "gpipe", .balance = {1, 4, 1}},
                                 {.ranks = 1, .is_whole = true}};
  for (const bool tied : {false, true}) {
    const TemporaryFolder folder;
    for (size_t from = 0; from < runs.size(); ++from) {
      const std::string path = folder.at(std::to_string(from));
      CHECK(go(runs[from], tied, "", path).empty());
      for (size_t to = 0; to < runs.size(); ++to) {
        CAPTURE(tied, from, to);
        CHECK(go(runs[to], tied, path, "").empty());
      }
    }
  }
}

TEST_CASE("what stages share is one entry, loaded into all copies") {
  const TemporaryFolder folder;
  std::vector<int> fine(2, 0);
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        Pipeline<> pipe(make_net(true), rank.communicator, PipelineOptions{.chunks = kChunks});
        const bool is_first = rank.where.rank == 0;
        at::Tensor copy = pipe->named_parameters()[is_first ? "0.weight" : "5.weight"];
        const at::Tensor saved = copy.detach().clone();
        save_checkpoint(folder.at("one"), *pipe);
        {
          const at::NoGradGuard no_grad;
          copy.add_(1);
        }
        load_checkpoint(folder.at("one"), *pipe);
        const CheckpointReader reader(folder.at("one"), {rank.communicator});
        const auto& names = reader.tensors(kModelTensors);
        fine[static_cast<size_t>(rank.where.rank)] =
            static_cast<int>(copy.equal(saved) && names.count("0.weight") == 1 &&
                             names.count("5.weight") == 0 && names.count("3.bias") == 1);
      },
      std::chrono::seconds(30), Engine::kShm);
  CHECK(fine == std::vector<int>(2, 1));
}

TEST_CASE("optimizers of stages that do not belong together are refused on all ranks") {
  const TemporaryFolder folder;
  std::vector<std::string> missing(2), unlike(2);
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        const auto number = static_cast<size_t>(rank.where.rank);
        Pipeline<> pipe(make_net(), rank.communicator, PipelineOptions{.chunks = kChunks});
        torch::optim::AdamW optimizer(pipe->parameters(), 0.1 * (1 + double(number)));
        const auto error_of_save = [&](torch::optim::Optimizer* given) -> std::string {
          try {
            save_checkpoint(folder.at("refused"), *pipe, {.optimizer = given});
          } catch (const c10::ValueError& error) {
            return error.what_without_backtrace();
          }
          return "";
        };
        missing[number] = error_of_save(number == 0 ? &optimizer : nullptr);
        unlike[number] = error_of_save(&optimizer);
      },
      std::chrono::seconds(30), Engine::kShm);
  for (const std::string& error : missing)
    CHECK(error.find("got an optimizer on rank 0, and none on rank 1") != std::string::npos);
  for (const std::string& error : unlike)
    CHECK(error.find("got 'lr' of parameter group 0 as 0.1 on rank 0 and as 0.2 on rank 1") !=
          std::string::npos);
}

}  // namespace trireme::pipeline_checkpoint_test
