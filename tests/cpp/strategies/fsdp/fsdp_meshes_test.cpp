// C++ units under one root that different ranks share: experts, of which each pair of ranks has
// one, inside a model of all four. It trains as one process does that has both experts.

#include <trireme/comm/subgroups.h>
#include <trireme/saving/module_checkpoint.h>

#include <catch_torch.h>
#include <mutex>
#include <strategies/fsdp/fsdp_ranks.h>
#include <temporary_folder.h>
#include <vector>

namespace trireme::fsdp_meshes_test {

using namespace trireme::test;
using torch::nn::Linear;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

namespace {

constexpr int64_t kRanks = 4;
constexpr int64_t kExperts = 2;
constexpr int64_t kSteps = 4;

// All layers of the model, with both experts.
struct MixtureImpl : torch::nn::Module {
  MixtureImpl() {
    const std::lock_guard<std::mutex> lock(zero_seed_mutex);
    torch::manual_seed(9);
    inner = register_module("inner", Linear(6, 7));
    experts = {register_module("expert0", Linear(7, 7)), register_module("expert1", Linear(7, 7))};
    outer = register_module("outer", Linear(7, 3));
  }
  at::Tensor forward(const at::Tensor& x, int64_t expert, bool routes) {
    at::Tensor hidden = torch::tanh(inner(x));
    if (routes) hidden = hidden + torch::tanh(experts[static_cast<size_t>(expert)](hidden));
    return outer(hidden).square().mean();
  }
  Linear inner{nullptr}, outer{nullptr};
  std::vector<Linear> experts;
};
TORCH_MODULE(Mixture);

// What one rank has of it: the expert is a unit of the ranks that have the same one.
struct OwnMixtureImpl : torch::nn::Module {
  explicit OwnMixtureImpl(const ThreadRank& rank) {
    const Mixture whole;
    inner = register_module("inner", whole->inner);
    const int64_t number = rank.where.rank % kExperts;
    const Linear own = whole->experts[static_cast<size_t>(number)];
    expert = register_module(
        "expert" + std::to_string(number),
        fully_shard(own, {.communicator = split_strided(*rank.communicator, kExperts)}));
    expert->set_gradient_divide_factor(kRanks);
    outer = register_module("outer", whole->outer);
  }
  at::Tensor forward(const at::Tensor& x, bool routes) {
    at::Tensor hidden = torch::tanh(inner(x));
    if (routes) hidden = hidden + torch::tanh(expert->forward(hidden));
    return outer(hidden).square().mean();
  }
  Linear inner{nullptr}, outer{nullptr};
  Sharded<Linear> expert{nullptr};
};
TORCH_MODULE(OwnMixture);

// Rank 1 leaves its expert out in step 1, ranks 0 and 1 in step 2: they come to the collectives in
// different orders.
bool routes_in(int64_t step, int64_t rank) { return step == 1 ? rank != 1 : step != 2 || rank > 1; }

// Inner, expert, outer of each rank after some steps, clipped in each.
std::vector<Values> train_both_experts() {
  Mixture net;
  AdamW optimizer(net->parameters(), AdamWOptions(0.02));
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      const at::Tensor part = part_of_batch(step, {rank, kRanks});
      (net->forward(part, rank % kExperts, routes_in(step, rank)) / kRanks).backward();
    }
    torch::nn::utils::clip_grad_norm_(net->parameters(), 0.05);
    optimizer.step();
  }
  std::vector<Values> of_ranks;
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    const Linear& expert = net->experts[static_cast<size_t>(rank % kExperts)];
    of_ranks.push_back(values_of({net->inner->weight, net->inner->bias, expert->weight,
                                  expert->bias, net->outer->weight, net->outer->bias}));
  }
  return of_ranks;
}

Values train_own(ThreadRank& rank, const std::string& checkpoint) {
  OwnMixture net(rank);
  const std::vector<at::Tensor> expert = net->expert->module().parameters();
  auto model = fully_shard(net, over(rank));
  AdamW optimizer(model->parameters(), AdamWOptions(0.02));
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    model->forward(part_of_batch(step, rank.where), routes_in(step, rank.where.rank)).backward();
    model->clip_grad_norm_(0.05);
    trireme::step(optimizer);
  }
  save_checkpoint(checkpoint, *model, {.communicator = rank.communicator});
  model->begin_writing();
  for (at::Tensor& shard : model->parameters()) shard.detach().zero_();
  load_checkpoint(checkpoint, *model, {.communicator = rank.communicator});
  model->unshard();
  net->expert->unshard();
  return values_of({net->inner->weight, net->inner->bias, expert[0], expert[1], net->outer->weight,
                    net->outer->bias});
}

}  // namespace

TEST_CASE("a model of all ranks with experts of two ranks each, over shared memory and Gloo") {
  const std::vector<Values> expected = train_both_experts();
  for (const Engine engine : {Engine::kShm, Engine::kGloo}) {
    const TemporaryFolder folder;
    const std::string checkpoint = folder.at("checkpoint");
    const auto found = on_ranks<Values>(
        kRanks, engine, [&](ThreadRank& rank) { return train_own(rank, checkpoint); });
    for (size_t rank = 0; rank < found.size(); ++rank)
      CHECK(count_unlike(found[rank], expected[rank]) == 0);

    Mixture plain;
    for (const at::Tensor& parameter : plain->parameters()) parameter.detach().zero_();
    on_ranks<bool>(1, Engine::kShm, [&](ThreadRank& rank) {
      load_checkpoint(checkpoint, *plain, {.communicator = rank.communicator});
      return true;
    });
    for (size_t number = 0; number < kExperts; ++number) {
      const Linear& expert = plain->experts[number];
      CHECK(count_unlike({expert->weight, expert->bias},
                         {expected[number][2], expected[number][3]}) == 0);
    }
  }
}

TEST_CASE("a unit that more ranks share than the outermost one is refused") {
  const auto errors = on_shm_ranks<std::string>(2, [](ThreadRank& rank) {
    torch::nn::Sequential net(fully_shard(Linear(4, 4), over(rank)), Linear(4, 4));
    auto model = fully_shard(net, {.communicator = split_contiguous(*rank.communicator, 1)});
    return error_of<c10::ValueError>([&] { model->forward(torch::ones({1, 4})); });
  });
  for (const std::string& error : errors) {
    CHECK_THAT(error, Catch::Contains("of 2 ranks on cpu inside a unit of 1 on cpu"));
    CHECK_THAT(error, Catch::Contains("some of its ranks"));
  }
}

}  // namespace trireme::fsdp_meshes_test
