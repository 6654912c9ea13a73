#pragma once

#include <trireme/strategies/parameter_server/parameter_server.h>

#include <torch/nn.h>
#include <torch/optim.h>

#include <catch_torch.h>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <strategies/values.h>
#include <string>
#include <thread_ranks.h>
#include <utility>
#include <vector>

namespace trireme::test {

// Ranks as threads that share memory; results by rank.
template <typename Result>
std::vector<Result> on_workers(int64_t world, const std::function<Result(ThreadRank&)>& rank_main) {
  std::vector<Result> results(static_cast<size_t>(world));
  run_thread_ranks(
      world,
      [&](ThreadRank& rank) { results[static_cast<size_t>(rank.where.rank)] = rank_main(rank); },
      std::chrono::seconds(30), Engine::kShm);
  return results;
}

// A table of one tensor with so many zeros.
inline ps::TableSpec zeros_table(const std::string& name, int64_t numel, ps::Optimizer optimizer,
                                 ps::DenseOptions options = {}) {
  ps::NamedTensors tensors;
  tensors.insert("x", at::zeros({numel}));
  return ps::dense(name, tensors, std::move(optimizer), options);
}

inline ps::NamedTensors named_x(at::Tensor tensor) {
  ps::NamedTensors tensors;
  tensors.insert("x", std::move(tensor));
  return tensors;
}

// Two layers of uneven shapes, one of which takes more than one block; the same on every rank.
inline torch::nn::Sequential two_layers() {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  torch::manual_seed(5);
  return torch::nn::Sequential(torch::nn::Linear(300, 150), torch::nn::Tanh(),
                               torch::nn::Linear(150, 3));
}

// The gradients that a worker pushes in a clock, drawn of its number and the clock.
inline Values drawn_gradients(const Values& like, int64_t worker, int64_t clock) {
  Values gradients;
  for (const at::Tensor& tensor : like) {
    const at::Tensor places = at::arange(tensor.numel(), at::kDouble).view(tensor.sizes());
    gradients.push_back(
        at::sin(places * static_cast<double>(worker + 2) + static_cast<double>(clock))
            .to(tensor.scalar_type()));
  }
  return gradients;
}

inline Values copies_of(const Values& tensors) {
  Values copies;
  for (const at::Tensor& tensor : tensors) copies.push_back(tensor.detach().clone());
  return copies;
}

inline void set_gradients(const Values& parameters, const Values& gradients) {
  for (size_t i = 0; i < parameters.size(); ++i) parameters[i].mutable_grad() = gradients[i];
}

}  // namespace trireme::test
