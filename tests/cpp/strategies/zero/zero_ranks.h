#pragma once

#include <trireme/strategies/ddp/distributed_data_parallel.h>
#include <trireme/strategies/zero/zero_redundancy_optimizer.h>

#include <torch/nn.h>
#include <torch/optim.h>

#include <algorithm>
#include <catch_torch.h>
#include <functional>
#include <mutex>
#include <optional>
#include <strategies/values.h>
#include <string>
#include <thread_ranks.h>
#include <utility>
#include <vector>

namespace trireme::test {

// Seeding is global; building a net has to be one thread's business at a time.
inline std::mutex zero_seed_mutex;

// Rows that no number of ranks divides, fewer rows than ranks, a scalar, a head that is not always
// used, and one that is frozen.
struct UnevenNetImpl : torch::nn::Module {
  UnevenNetImpl() {
    const std::lock_guard<std::mutex> lock(zero_seed_mutex);
    torch::manual_seed(7);
    first = register_module("first", torch::nn::Linear(6, 13));
    second = register_module("second", torch::nn::Linear(13, 2));
    head = register_module("head", torch::nn::Linear(13, 5));
    gain = register_parameter("gain", torch::ones({}));
    frozen = register_parameter("frozen", torch::ones({3}), /*requires_grad=*/false);
  }
  at::Tensor forward(const at::Tensor& x, bool with_head = true) {
    const at::Tensor hidden = torch::tanh(first(x)) * gain;
    at::Tensor loss = second(hidden).square().mean() + frozen.sum();
    if (with_head) loss = loss + head(hidden).square().mean();
    return loss;
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, head{nullptr};
  at::Tensor gain, frozen;
};
TORCH_MODULE(UnevenNet);

constexpr int64_t kRows = 12;

inline at::Tensor whole_batch(int64_t step) {
  return at::sin(at::arange(kRows * 6, at::kDouble).view({kRows, 6}) *
                 static_cast<double>(step + 1))
      .to(at::kFloat);
}

// What rank r of them sees of it.
inline at::Tensor part_of_batch(int64_t step, RankOf where) {
  const int64_t share = kRows / where.world;
  return whole_batch(step).narrow(0, where.rank * share, share);
}

// Copies on the CPU.
inline Values values_of(const Values& tensors) {
  Values copies;
  for (const at::Tensor& tensor : tensors)
    copies.push_back(tensor.detach().to(at::kCPU, tensor.scalar_type(), false, /*copy=*/true));
  return copies;
}

// `call` with every number of steps behind it on one process and the whole batch: the oracle.
template <typename Optimizer>
void train(UnevenNet& net, Optimizer& optimizer, int64_t steps, RankOf where = {0, 1}) {
  for (int64_t step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    net->forward(part_of_batch(step, where), step % 2 == 0).backward();
    optimizer.step();
  }
}

template <typename Optimizer, typename Options>
Values train_alone(const Options& options, int64_t steps) {
  UnevenNet net;
  Optimizer optimizer(net->parameters(), options);
  train(net, optimizer, steps);
  return values_of(net->parameters());
}

// Has gradients in another dtype than its parameters.
inline UnevenNet net_with_gradients_in(at::ScalarType dtype) {
  UnevenNet net;
  for (const at::Tensor& parameter : net->parameters()) parameter.set_grad_dtype(dtype);
  return net;
}

inline int64_t count_gradients_in(at::ScalarType dtype, const Values& parameters) {
  return std::count_if(parameters.begin(), parameters.end(), [&](const at::Tensor& parameter) {
    return parameter.grad().defined() && parameter.grad().scalar_type() == dtype;
  });
}

// Ranks as threads that collect what they have to say, by rank.
template <typename Result>
std::vector<Result> on_ranks(int64_t world, Engine engine,
                             const std::function<Result(ThreadRank&)>& rank_main) {
  std::vector<Result> results(static_cast<size_t>(world));
  run_thread_ranks(
      world,
      [&](ThreadRank& rank) { results[static_cast<size_t>(rank.where.rank)] = rank_main(rank); },
      std::chrono::seconds(30), engine);
  return results;
}

}  // namespace trireme::test
