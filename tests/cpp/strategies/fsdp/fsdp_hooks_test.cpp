// All-reduce hooks of fully_shard's C++ door: ranks are threads that share memory.

#include <catch_torch.h>
#include <strategies/fsdp/fsdp_ranks.h>
#include <vector>

namespace trireme::fsdp_hooks_test {

using namespace trireme::test;
using torch::optim::SGD;

namespace {

struct Seen {
  std::vector<int64_t> numels;
  Values parameters;
};

// Trains with a hook that makes gradients `factor` times as large.
std::vector<Seen> train_with_hook(int64_t world, float factor) {
  return on_shm_ranks<Seen>(world, [&](ThreadRank& rank) {
    Seen seen;
    UnevenNet net;
    auto model = fully_shard(net, over(rank));
    SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
    model->set_all_reduce_hook([&](at::Tensor& gradients) {
      seen.numels.push_back(gradients.numel());
      gradients.mul_(factor);
    });
    for (int64_t step = 0; step < 3; ++step) fsdp_step(model, optimizer, step, rank.where);
    model->set_all_reduce_hook({});
    fsdp_step(model, optimizer, 3, rank.where);
    seen.parameters = whole_values(*model, net->parameters());
    return seen;
  });
}

}  // namespace

TEST_CASE(
    "hooks of register_hook on a shard see this rank's part of the average, and may change it") {
  for (const Engine engine : {Engine::kShm, Engine::kGloo}) {
    const auto found = on_ranks<Values>(2, engine, [](ThreadRank& rank) {
      UnevenNet net;
      auto model = fully_shard(net, over(rank));
      SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
      at::Tensor shard = model->named_parameters()["first.weight"], seen;
      const unsigned hook = shard.register_hook([&](const at::Tensor& gradient) {
        seen = gradient.clone();
        return gradient * 2;
      });
      for (int64_t step = 0; step < 3; ++step) {
        fsdp_step(model, optimizer, step, rank.where);
        TORCH_CHECK(at::equal(shard.grad(), seen * 2));
      }
      shard.remove_hook(hook);
      fsdp_step(model, optimizer, 3, rank.where);
      return whole_values(*model, net->parameters());
    });
    UnevenNet one;
    SGD optimizer(one->parameters(), torch::optim::SGDOptions(0.1));
    one->first->weight.register_hook([](const at::Tensor& gradient) { return gradient * 2; });
    train(one, optimizer, 3);
    one->first->weight.remove_hook(0);
    optimizer.zero_grad();
    one->forward(whole_batch(3), false).backward();
    optimizer.step();
    for (const Values& values : found)
      CHECK(count_unlike(values, values_of(one->parameters())) == 0);
  }
}

TEST_CASE("a hook changes the gradients that the optimizer sees, once per backward") {
  for (const int64_t world : {1, 3}) {
    CAPTURE(world);
    const std::vector<Seen> seen = train_with_hook(world, 2);
    const std::vector<Seen> plain = train_with_hook(world, 1);
    for (const Seen& rank : seen) {
      CHECK(rank.numels.size() == 3);
      CHECK(rank.numels == seen.front().numels);  // all ranks have as many
      CHECK(count_unlike(rank.parameters, seen.front().parameters) == 0);
      CHECK(count_unlike(rank.parameters, plain.front().parameters) > 0);
    }
  }
}

TEST_CASE("ranks of any number see the same average") {
  const std::vector<Seen> alone = train_with_hook(1, 2);
  for (const Seen& rank : train_with_hook(2, 2))
    CHECK(count_unlike(rank.parameters, alone.front().parameters) == 0);
}

}  // namespace trireme::fsdp_hooks_test
