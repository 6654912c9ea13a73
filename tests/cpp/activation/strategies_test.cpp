// Checkpointed blocks train as plain ones do, bit for bit, under every strategy. Ranks are threads,
// which share the CPU's generator: only replicas of DataParallel draw random numbers here.

#include <trireme/activation/checkpoint.h>
#include <trireme/strategies/data_parallel/data_parallel.h>

#include <catch_torch.h>
#include <functional>
#include <mutex>
#include <strategies/fsdp/fsdp_ranks.h>
#include <string>
#include <utility>
#include <vector>

namespace trireme::checkpoint_strategies_test {

using namespace trireme::test;
using torch::optim::SGD;
using torch::optim::SGDOptions;

namespace {

// Where the checkpoints are. Under fully_shard a block may be a unit, and there may be one around
// it and one in it.
enum class Where { kNowhere, kAround, kInside, kBoth };
constexpr Where kEverywhere[] = {Where::kAround, Where::kInside, Where::kBoth};

struct BlockImpl : torch::nn::Cloneable<BlockImpl> {
  explicit BlockImpl(Where where, double dropout = 0)
      : is_checkpointed(where == Where::kInside || where == Where::kBoth), dropout(dropout) {
    reset();
  }
  void reset() override {
    first = register_module("first", torch::nn::Linear(6, 13));
    second = register_module("second", torch::nn::Linear(13, 6));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto run = [this](const at::Tensor& value) {
      return value + at::dropout(second(torch::tanh(first(value))), dropout, is_training());
    };
    return is_checkpointed ? checkpoint(run, x) : run(x);
  }
  bool is_checkpointed;
  double dropout;
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(Block);

struct FragileImpl : torch::nn::Module {
  FragileImpl() {
    const std::lock_guard<std::mutex> lock(zero_seed_mutex);
    torch::manual_seed(7);
    first = register_module("first", torch::nn::Linear(6, 5));
    second = register_module("second", torch::nn::Linear(5, 2));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto run = [this](const at::Tensor& value) {
      TORCH_CHECK_VALUE(!is_broken, "the data of this rank are broken");
      return torch::tanh(second(value));
    };
    return checkpoint(run, first(x)).square().mean();
  }
  bool is_broken = false;
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(Fragile);

// `Unit` is Block, or what fully_shard makes of it. The first block runs twice, the last one never.
template <typename Unit>
struct BlocksImpl : torch::nn::Module {
  BlocksImpl(std::vector<Unit> units, Where where)
      : blocks(std::move(units)),
        is_checkpointed(where == Where::kAround || where == Where::kBoth) {
    for (size_t i = 0; i < blocks.size(); ++i)
      register_module("block" + std::to_string(i), blocks[i]);
    gain = register_parameter("gain", at::ones({6}));
  }
  at::Tensor forward(const at::Tensor& x, bool /*with_head*/ = true) {
    at::Tensor hidden = x * gain;
    for (const size_t number : {0, 1, 0, 2})
      hidden =
          is_checkpointed ? checkpoint(blocks[number], hidden) : blocks[number]->forward(hidden);
    return hidden.square().mean();
  }
  std::vector<Unit> blocks;
  bool is_checkpointed;
  at::Tensor gain;
};
template <typename Unit>
struct Blocks : torch::nn::ModuleHolder<BlocksImpl<Unit>> {
  using torch::nn::ModuleHolder<BlocksImpl<Unit>>::ModuleHolder;
};

template <typename Unit, typename Wrap>
Blocks<Unit> make_blocks(Where where, const Wrap& wrap) {
  std::vector<Block> plain;
  {
    const std::lock_guard<std::mutex> lock(zero_seed_mutex);
    torch::manual_seed(7);
    for (int i = 0; i < 4; ++i) plain.emplace_back(where);
  }
  std::vector<Unit> units;
  for (const Block& block : plain) units.push_back(wrap(block));
  return Blocks<Unit>(std::move(units), where);
}

Blocks<Block> plain_blocks(Where where) {
  return make_blocks<Block>(where, [](const Block& block) { return block; });
}

// Losses, gradients and parameters of some steps: the second accumulates, the third has two
// backwards. `scope` has no_sync().
template <typename Model, typename Scope>
Values trained(Model& model, Scope& scope, torch::optim::Optimizer& optimizer, RankOf where) {
  Values seen;
  const Values parameters = model->parameters();
  for (int64_t number = 0; number < 4; ++number) {
    optimizer.zero_grad();
    if (number == 1) {
      const auto guard = scope.no_sync();
      model->forward(part_of_batch(9, where)).backward();
    }
    const at::Tensor loss = model->forward(part_of_batch(number, where));
    loss.backward({}, /*retain_graph=*/number == 2);
    if (number == 2) loss.backward();
    seen.push_back(loss.detach());
    for (const at::Tensor& parameter : parameters)
      seen.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
    trireme::step(optimizer);
    const Values values = values_of(parameters);
    seen.insert(seen.end(), values.begin(), values.end());
  }
  return seen;
}

Values train_ddp(ThreadRank& rank, Where where) {
  DistributedDataParallel<Blocks<Block>> model(plain_blocks(where), rank.communicator);
  SGD optimizer(model->parameters(), SGDOptions(0.1).momentum(0.9));
  return trained(model, *model, optimizer, rank.where);
}

Values train_zero(ThreadRank& rank, Where where) {
  Blocks<Block> net = plain_blocks(where);
  ZeroRedundancyOptimizer<SGD> optimizer(net, SGDOptions(0.1).momentum(0.9), rank.communicator,
                                         {.stage = 2});
  return trained(net, optimizer, optimizer, rank.where);
}

template <typename Unit>
Values train_fsdp(const Blocks<Unit>& net, ThreadRank& rank, bool reshards) {
  auto model = fully_shard(net, over(rank));
  model->set_reshard_after_forward(reshards);
  SGD optimizer(model->parameters(), SGDOptions(0.1).momentum(0.9));
  return trained(model, *model, optimizer, rank.where);
}

using Train = std::function<Values(ThreadRank&, Where)>;

void check_bits(const Train& train) {
  for (const Engine engine : {Engine::kGloo, Engine::kShm}) {
    const auto train_all = [&](Where where) {
      return on_ranks<Values>(2, engine, [&](ThreadRank& rank) { return train(rank, where); });
    };
    const auto plain = train_all(Where::kNowhere);
    for (const Where where : kEverywhere) {
      CAPTURE(static_cast<int>(engine), static_cast<int>(where));
      const auto found = train_all(where);
      for (const size_t rank : {0, 1}) CHECK(count_unlike(found[rank], plain[rank], 0) == 0);
    }
  }
}

}  // namespace

TEST_CASE("checkpointed blocks under DDP") { check_bits(train_ddp); }

TEST_CASE("checkpointed blocks under ZeRO 2") { check_bits(train_zero); }

TEST_CASE("checkpointed blocks under fully_shard, in one unit") {
  check_bits(
      [](ThreadRank& rank, Where where) { return train_fsdp(plain_blocks(where), rank, false); });
}

TEST_CASE("checkpoints around units of fully_shard and in them, which are freed or kept") {
  for (const bool reshards : {true, false}) {
    check_bits([&](ThreadRank& rank, Where where) {
      const auto shard = [&](const Block& block) { return fully_shard(block, over(rank)); };
      return train_fsdp(make_blocks<Sharded<Block>>(where, shard), rank, reshards);
    });
  }
}

TEST_CASE("checkpointed replicas draw the random numbers of their forward") {
  const auto train = [](Where where) {
    torch::manual_seed(7);
    const Block net(where, /*dropout=*/0.4);
    DataParallelOptions options;
    options.replicas = 2;
    DataParallel<Block> model(net, options);
    SGD optimizer(net->parameters(), SGDOptions(0.1));
    Values seen;
    for (int64_t number = 0; number < 3; ++number) {
      optimizer.zero_grad();
      const at::Tensor loss = model->forward(whole_batch(number)).square().mean();
      loss.backward();
      optimizer.step();
      seen.push_back(loss.detach());
    }
    const Values values = values_of(net->parameters());
    seen.insert(seen.end(), values.begin(), values.end());
    return seen;
  };
  CHECK(count_unlike(train(Where::kInside), train(Where::kNowhere), 0) == 0);
}

TEST_CASE("what a recomputation throws leaves the backward of its rank, and the next step works") {
  const auto said = on_shm_ranks<std::string>(2, [&](ThreadRank& rank) {
    Fragile net;
    DistributedDataParallel<Fragile> model(net, rank.communicator);
    SGD optimizer(model->parameters(), SGDOptions(0.1));
    std::string texts;
    for (int64_t number = 0; number < 3; ++number) {
      optimizer.zero_grad();
      const at::Tensor loss = model->forward(part_of_batch(number, rank.where));
      net->is_broken = number == 1 && rank.where.rank == 1;
      texts += error_of([&] { loss.backward(); }) + "|";
      net->is_broken = false;
      if (number != 1) optimizer.step();
    }
    return texts;
  });
  CHECK(said[1] == "no error|the data of this rank are broken|no error|");
  CHECK_THAT(said[0], Catch::StartsWith("no error|") && Catch::EndsWith("|no error|") &&
                          Catch::Contains("was abandoned") &&
                          Catch::Contains("the data of this rank are broken") &&
                          Catch::Contains("rank 1 of 2"));
}

}  // namespace trireme::checkpoint_strategies_test
