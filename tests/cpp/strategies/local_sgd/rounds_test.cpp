// LocalSGD and DiLoCo of C++ modules: against a simulation on one thread, faults, and checkpoints.

#include <trireme/saving/module_checkpoint.h>
#include <trireme/strategies/local_sgd/module_rounds.h>

#include <torch/nn.h>
#include <torch/optim.h>

#include <atomic>
#include <catch_torch.h>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <temporary_folder.h>
#include <thread_ranks.h>
#include <vector>

namespace trireme::rounds_test {

using torch::nn::Linear;
using torch::nn::Sequential;
using trireme::test::run_thread_ranks;
using trireme::test::TemporaryFolder;
using trireme::test::ThreadRank;

namespace {

constexpr int64_t kWorkers = 2;

Sequential net() {
  Sequential made(Linear(6, 13), torch::nn::Tanh(), Linear(13, 3));
  const at::NoGradGuard no_grad;
  double phase = 1;
  for (at::Tensor& parameter : made->parameters()) {
    const at::Tensor numbers = at::arange(parameter.numel()).to(at::kFloat).view_as(parameter);
    parameter.copy_(at::sin(numbers * phase) * 0.5);
    phase += 0.5;
  }
  return made;
}

torch::optim::AdamW inner(Sequential& model) {
  return torch::optim::AdamW(model->parameters(), torch::optim::AdamWOptions(0.02));
}

void backward(Sequential& model, torch::optim::Optimizer& optimizer, int64_t step, int64_t worker) {
  optimizer.zero_grad();
  const at::Tensor rows = at::cos(at::arange(24).view({4, 6}).to(at::kFloat) *
                                  static_cast<double>(step + 3 * worker + 1));
  model->forward(rows).square().mean().backward();
}

// DiLoCo of one fragment as one thread does it; returns the parameters of a worker.
std::vector<at::Tensor> simulated(int64_t steps, int64_t period, int64_t delay, int64_t of_worker) {
  std::vector<Sequential> models{net(), net()};
  std::vector<torch::optim::AdamW> optimizers;
  for (Sequential& model : models) optimizers.push_back(inner(model));
  std::vector<at::Tensor> anchors, buffers, means;
  for (const at::Tensor& parameter : models[0]->parameters())
    anchors.push_back(parameter.detach().clone());
  buffers.resize(anchors.size());
  for (int64_t step = 0; step < steps; ++step) {
    for (size_t worker = 0; worker < models.size(); ++worker) {
      backward(models[worker], optimizers[worker], step, static_cast<int64_t>(worker));
      optimizers[worker].step();
    }
    const at::NoGradGuard no_grad;
    if (step % period == period - delay - 1) {
      means.clear();
      for (size_t i = 0; i < anchors.size(); ++i)
        means.push_back(((anchors[i] - models[0]->parameters()[i]) +
                         (anchors[i] - models[1]->parameters()[i])) /
                        2);
    }
    if (step % period != period - 1) continue;
    for (size_t i = 0; i < anchors.size(); ++i) {
      buffers[i] = buffers[i].defined() ? buffers[i] * 0.9 + means[i] : means[i].clone();
      anchors[i].sub_((means[i] + buffers[i] * 0.9) * 0.7);
      for (Sequential& model : models) model->parameters()[i].copy_(anchors[i]);
    }
  }
  std::vector<at::Tensor> found;
  for (const at::Tensor& parameter : models[static_cast<size_t>(of_worker)]->parameters())
    found.push_back(parameter.detach().clone());
  return found;
}

bool all_close(const std::vector<at::Tensor>& ours, const std::vector<at::Tensor>& theirs) {
  for (size_t i = 0; i < ours.size(); ++i)
    if (!at::allclose(ours[i], theirs[i], 1e-5, 1e-6)) return false;
  return ours.size() == theirs.size();
}

bool all_equal(const std::vector<at::Tensor>& ours, const std::vector<at::Tensor>& theirs) {
  for (size_t i = 0; i < ours.size(); ++i)
    if (!at::equal(ours[i], theirs[i])) return false;
  return ours.size() == theirs.size();
}

}  // namespace

TEST_CASE("DiLoCo does what one thread does") {
  for (const int64_t delay : {int64_t{0}, int64_t{1}}) {
    std::atomic<int> equal{0};
    run_thread_ranks(kWorkers, [&](ThreadRank& rank) {
      Sequential model = net();
      auto optimizer = inner(model);
      DiLoCo rounds(*model, optimizer,
                    {.sync_every = 4, .fragment_sync_delay = delay, .across = rank.communicator});
      for (int64_t step = 0; step < 9; ++step) {
        backward(model, optimizer, step, rank.where.rank);
        rounds.step();
      }
      if (all_close(model->parameters(), simulated(9, 4, delay, rank.where.rank))) ++equal;
    });
    CHECK(equal == kWorkers);
  }
}

TEST_CASE("LocalSGD averages, by weights, and gives the outer optimizer back") {
  std::atomic<int> right{0};
  run_thread_ranks(kWorkers, [&](ThreadRank& rank) {
    Linear model(2, 1);
    {
      const at::NoGradGuard no_grad;
      model->weight.fill_(1);
    }
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(1));
    {
      LocalSGD rounds(*model, optimizer, {.sync_every = 1, .across = rank.communicator});
      rounds.set_weight(rank.where.rank == 0 ? 1 : 3);
      model->weight.mutable_grad() = at::full({1, 2}, rank.where.rank == 0 ? 4.0 : 0.0, at::kFloat);
      rounds.step();
    }
    if (at::equal(model->weight, at::zeros({1, 2}))) ++right;
    torch::optim::SGD outer(model->parameters(), torch::optim::SGDOptions(1).momentum(0.5));
    {
      DiLoCo rounds(*model, optimizer,
                    {.sync_every = 1, .outer_optimizers = {&outer}, .across = rank.communicator});
      rounds.step();
      if (!outer.param_groups()[0].params()[0].is_same(model->weight)) ++right;
    }
    if (outer.param_groups()[0].params()[0].is_same(model->weight) && outer.state().size() == 2)
      ++right;
  });
  CHECK(right == 3 * kWorkers);
}

TEST_CASE("rounds resume bit for bit, with a fragment on its way") {
  const TemporaryFolder folder;
  for (const bool codes : {false, true}) {
    std::atomic<int> equal{0};
    run_thread_ranks(kWorkers, [&](ThreadRank& rank) {
      const DiLoCoOptions options{
          .sync_every = 6,
          .fragments = 2,
          .fragment_sync_delay = 2,
          .fragment_update_alpha = 0.25,
          .across = rank.communicator,
          .compression = codes ? std::optional<Compression>(Int8{.dense_below = 0}) : std::nullopt};
      Sequential first = net(), second = net();
      auto optimizer = inner(first), other = inner(second);
      DiLoCo rounds(*first, optimizer, options);
      const auto run = [&](Sequential& model, torch::optim::Optimizer& steps, DiLoCo& of,
                           int64_t begin, int64_t end) {
        for (int64_t step = begin; step < end; ++step) {
          backward(model, steps, step, rank.where.rank);
          of.step();
        }
      };
      run(first, optimizer, rounds, 0, 7);
      save_checkpoint(
          folder.at("saved"), *first,
          {.optimizer = &optimizer, .communicator = rank.communicator, .rounds = &rounds});
      run(first, optimizer, rounds, 7, 13);
      DiLoCo again(*second, other, options);
      load_checkpoint(folder.at("saved"), *second,
                      {.optimizer = &other, .communicator = rank.communicator, .rounds = &again});
      run(second, other, again, 7, 13);
      if (all_equal(first->parameters(), second->parameters())) ++equal;
    });
    CHECK(equal == kWorkers);
  }
}

TEST_CASE("options that differ, other optimizers and second rounds are refused") {
  std::atomic<int> refused{0};
  const auto expect = [&](const char* part, const auto& call) {
    try {
      call();
    } catch (const c10::ValueError& error) {
      if (std::string(error.what()).find(part) != std::string::npos) ++refused;
    }
  };
  run_thread_ranks(kWorkers, [&](ThreadRank& rank) {
    Sequential model = net(), strange = net();
    auto optimizer = inner(model), other = inner(strange);
    expect("sync_every=2", [&] {
      LocalSGD(*model, optimizer, {.sync_every = 1 + rank.where.rank, .across = rank.communicator});
    });
    expect("other parameters",
           [&] { LocalSGD(*model, other, {.sync_every = 1, .across = rank.communicator}); });
    expect("outer_optimizer over other parameters", [&] {
      DiLoCo(*model, optimizer,
             {.sync_every = 1, .outer_optimizers = {&other}, .across = rank.communicator});
    });
    const LocalSGDOptions options{.sync_every = 5, .across = rank.communicator};
    auto first = std::make_unique<LocalSGD>(*model, optimizer, options);
    LocalSGD second(*model, optimizer, options), third(*model, optimizer, options);
    first->step();
    expect("other open rounds", [&] { second.step(); });
    expect("weight=-1", [&] { first->set_weight(-1); });
    first.reset();
    second.step();  // begins, which it had not
    expect("other open rounds", [&] { third.step(); });
  });
  CHECK(refused == 6 * kWorkers);
}

TEST_CASE("an exception in a step of one worker is named on the others") {
  std::atomic<int> named{0};
  run_thread_ranks(
      kWorkers,
      [&](ThreadRank& rank) {
        Sequential model = net();
        auto optimizer = inner(model);
        LocalSGD rounds(*model, optimizer, {.sync_every = 1, .across = rank.communicator});
        rounds.step();
        try {
          rounds.step([&]() -> at::Tensor {
            TORCH_CHECK(rank.where.rank != 1, "the data of this rank are broken");
            return at::zeros({});
          });
        } catch (const c10::Error& error) {
          if (std::string(error.what()).find("are broken") != std::string::npos) ++named;
        }
      },
      std::chrono::seconds(30), trireme::test::Engine::kShm);
  CHECK(named == kWorkers);
}

}  // namespace trireme::rounds_test
