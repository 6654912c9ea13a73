// Workers of two ranks, kept at one module by DistributedDataParallel, ZeRO or fully_shard.

#include <trireme/comm/subgroups.h>
#include <trireme/saving/module_checkpoint.h>
#include <trireme/strategies/ddp/distributed_data_parallel.h>
#include <trireme/strategies/fsdp/fully_shard.h>
#include <trireme/strategies/local_sgd/module_rounds.h>
#include <trireme/strategies/local_sgd/rounds.h>
#include <trireme/strategies/zero/zero_redundancy_optimizer.h>

#include <torch/nn.h>
#include <torch/optim.h>

#include <algorithm>
#include <atomic>
#include <catch_torch.h>
#include <string>
#include <temporary_folder.h>
#include <thread_ranks.h>
#include <vector>

namespace trireme::workers_test {

using torch::nn::Linear;
using trireme::test::run_thread_ranks;
using trireme::test::TemporaryFolder;
using trireme::test::ThreadRank;

namespace {

constexpr int64_t kRanks = 4;

torch::optim::SGDOptions by_gradient() { return torch::optim::SGDOptions(1); }

Linear net() {
  Linear made(4, 3);
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : made->parameters()) parameter.fill_(1);
  return made;
}

// Workers 0 and 1 move by 1 and 3.
double slope_of(const ThreadRank& rank) { return rank.where.rank < 2 ? 1 : 3; }

// All come to 1 - 2.
bool has_mean(const Linear& module) {
  bool is_right = true;
  for (const at::Tensor& parameter : module->parameters())
    is_right = is_right && at::equal(parameter, at::full_like(parameter, -1));
  return is_right;
}

}  // namespace

TEST_CASE("each element crosses once, and all ranks of a worker have the mean") {
  std::atomic<int> right{0};
  run_thread_ranks(kRanks, [&](ThreadRank& rank) {
    const auto inside = split_contiguous(*rank.communicator, 2);
    const auto across = split_strided(*rank.communicator, 2);
    Linear module = net();
    DistributedDataParallel<Linear> model(module, inside);
    torch::optim::SGD optimizer(model->parameters(), by_gradient());
    LocalSGD rounds(*model, optimizer, {.sync_every = 1, .across = across});
    for (const at::Tensor& parameter : module->parameters())
      parameter.mutable_grad() = at::full_like(parameter, slope_of(rank));
    rounds.step();
    if (has_mean(module)) ++right;
    int64_t sent = 0;  // one of the two parameters each
    for (const RoundParameter& parameter : rounds.core().parameters())
      if (parameter.anchor.defined()) ++sent;
    if (sent == 1) ++right;
  });
  CHECK(right == 2 * kRanks);
}

TEST_CASE("ranks send the parts that ZeRO gives them, to those that have the same") {
  std::atomic<int> right{0};
  run_thread_ranks(kRanks, [&](ThreadRank& rank) {
    const auto inside = split_contiguous(*rank.communicator, 2);
    const auto across = split_strided(*rank.communicator, 2);
    Linear module = net();
    ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(module->parameters(), by_gradient(),
                                                         inside, ZeroOptions{.stage = 2});
    {
      LocalSGD rounds(*module, optimizer, {.sync_every = 1, .across = across});
      (slope_of(rank) * (module->weight.sum() + module->bias.sum())).backward();
      rounds.step();
      if (has_mean(module)) ++right;
    }
    const int number = static_cast<int>(rank.where.rank);  // pairs 0 and 3, 1 and 2
    const auto wrong = rank.communicator->split(
        {std::min(number, 3 - number), std::max(number, 3 - number)}, "wrong");
    try {
      LocalSGD(*module, optimizer, {.sync_every = 1, .across = wrong});
    } catch (const c10::ValueError& error) {
      if (std::string(error.what()).find("expected the same on all") != std::string::npos) ++right;
    }
  });
  CHECK(right == 2 * kRanks);
}

TEST_CASE("workers under fully_shard resume bit for bit, with a fragment on its way") {
  const TemporaryFolder folder;
  std::atomic<int> equal{0};
  run_thread_ranks(kRanks, [&](ThreadRank& rank) {
    const auto inside = split_contiguous(*rank.communicator, 2);
    const DiLoCoOptions options{.sync_every = 4,
                                .fragment_sync_delay = 2,
                                .across = split_strided(*rank.communicator, 2),
                                .compression = Int8{.dense_below = 0}};
    const auto run = [&](auto& model, DiLoCo& rounds, int64_t begin, int64_t end) {
      for (int64_t step = begin; step < end; ++step) {
        model->zero_grad();
        const at::Tensor rows = at::cos(at::arange(8).view({2, 4}).to(at::kFloat) *
                                        static_cast<double>(step + 5 * rank.where.rank + 1));
        model->forward(rows).square().mean().backward();
        rounds.step();
      }
    };
    auto first = fully_shard(net(), {.communicator = inside});
    torch::optim::AdamW optimizer(first->parameters(), torch::optim::AdamWOptions(0.02));
    DiLoCo rounds(*first, optimizer, options);
    run(first, rounds, 0, 3);
    save_checkpoint(
        folder.at("saved"), *first,
        {.optimizer = &optimizer, .communicator = rank.communicator, .rounds = &rounds});
    run(first, rounds, 3, 6);
    const std::vector<at::Tensor> expected = first->parameters();
    auto second = fully_shard(net(), {.communicator = inside});
    torch::optim::AdamW other(second->parameters(), torch::optim::AdamWOptions(0.02));
    DiLoCo again(*second, other, options);
    load_checkpoint(folder.at("saved"), *second,
                    {.optimizer = &other, .communicator = rank.communicator, .rounds = &again});
    run(second, again, 3, 6);
    bool is_equal = true;
    for (size_t i = 0; i < expected.size(); ++i)
      is_equal = is_equal && at::equal(expected[i], second->parameters()[i]);
    if (is_equal) ++equal;
  });
  CHECK(equal == kRanks);
}

}  // namespace trireme::workers_test
