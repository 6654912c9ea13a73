// Compression under ZeRO 2, fully_shard, its replicas and replicas of a pipeline: they train as DDP
// does with the same codes, bit for bit, and resume.

#include <trireme/saving/module_checkpoint.h>
#include <trireme/strategies/pipeline/pipeline.h>

#include <catch_torch.h>
#include <cmath>
#include <functional>
#include <recording_communicator.h>
#include <strategies/fsdp/fsdp_ranks.h>
#include <string>
#include <temporary_folder.h>
#include <vector>

namespace trireme::compressed_test {

using namespace trireme::test;
using torch::nn::Linear;
using torch::nn::LinearOptions;
using torch::nn::Sequential;
using torch::optim::SGD;

namespace {

constexpr int64_t kWidth = 48;

Sequential net() {
  Sequential layers;
  for (int64_t i = 0; i < 2; ++i) {
    Linear layer(LinearOptions(kWidth, kWidth));
    const at::NoGradGuard no_grad;
    const at::Tensor place = at::arange(kWidth * kWidth, at::kFloat).view({kWidth, kWidth});
    layer->weight.copy_(at::sin(place.add(i)).div(8));
    layer->bias.fill_(0.1);
    layers->push_back(layer);
  }
  return layers;
}

at::Tensor batch(int64_t step, int64_t rank) {
  const at::Tensor place = at::arange(4 * kWidth, at::kFloat).view({4, kWidth});
  return at::cos(place * static_cast<double>(step + 2 * rank + 1));
}

at::Tensor loss_of(const at::Tensor& output) { return output.square().mean(); }

// Trains by `step`, which steps an optimizer, in `steps`.
void train(const std::function<void(int64_t)>& step, int64_t first, int64_t steps) {
  for (int64_t number = first; number < first + steps; ++number) step(number);
}

Values train_ddp(ThreadRank& rank, const Compression& compression, int64_t steps) {
  const Sequential plain = net();
  DistributedDataParallel<Sequential> model(plain, rank.communicator,
                                            DdpOptions{.compression = compression});
  SGD optimizer(plain->parameters(), 0.1);
  train(
      [&](int64_t number) {
        optimizer.zero_grad();
        loss_of(model->forward(batch(number, rank.where.rank))).backward();
        optimizer.step();
      },
      0, steps);
  return values_of(plain->parameters());
}

Values train_zero(ThreadRank& rank, const Compression& compression, int64_t steps,
                  const std::string& folder) {
  Values left;
  for (int64_t first = 0; first < steps; first += steps / 2) {  // saved and loaded half way
    Sequential plain = net();
    ZeroRedundancyOptimizer<SGD> optimizer(*plain, torch::optim::SGDOptions(0.1), rank.communicator,
                                           {.stage = 2, .compression = compression});
    if (first > 0)
      load_checkpoint(folder, *plain, {.optimizer = &optimizer, .communicator = rank.communicator});
    train(
        [&](int64_t number) {
          optimizer.zero_grad();
          loss_of(plain->forward(batch(number, rank.where.rank))).backward();
          optimizer.step();
        },
        first, steps / 2);
    const SaveCheckpointOptions saving{.optimizer = &optimizer, .communicator = rank.communicator};
    if (first == 0) save_checkpoint(folder, *plain, saving);
    left = values_of(plain->parameters());
  }
  return left;
}

Values train_sharded(ThreadRank& rank, FsdpOptions options, int64_t steps,
                     const std::string& folder) {
  options.communicator = rank.communicator;
  Values left;
  for (int64_t first = 0; first < steps; first += steps / 2) {
    const Sequential plain = net();
    auto model = fully_shard(plain, options);
    SGD optimizer(model->parameters(), 0.1);
    if (first > 0) load_checkpoint(folder, *model, {.communicator = rank.communicator});
    train(
        [&](int64_t number) {
          optimizer.zero_grad();
          loss_of(model->forward(batch(number, rank.where.rank))).backward();
          trireme::step(optimizer);
        },
        first, steps / 2);
    const SaveCheckpointOptions saving{.communicator = rank.communicator};
    if (first == 0) save_checkpoint(folder, *model, saving);
    left = whole_values(*model, plain->parameters());
  }
  return left;
}

}  // namespace

TEST_CASE("ZeRO 2 and fully_shard train as DDP does with the same codes, and resume") {
  const std::vector<Compression> methods{
      Sign{.between = Between::kRanks},
      Int8{.rounding = Rounding::kStochastic, .between = Between::kRanks},
      PowerSGD{.rank = 2, .start_step = 1, .between = Between::kRanks}};
  for (const Engine engine : {Engine::kGloo, Engine::kShm}) {
    for (const Compression& compression : methods) {
      INFO(to_string(compression));
      const TemporaryFolder folder;
      const auto ddp = on_ranks<Values>(
          2, engine, [&](ThreadRank& rank) { return train_ddp(rank, compression, 4); });
      const auto zero = on_ranks<Values>(2, engine, [&](ThreadRank& rank) {
        return train_zero(rank, compression, 4, folder.at("zero"));
      });
      const auto sharded = on_ranks<Values>(2, engine, [&](ThreadRank& rank) {
        return train_sharded(rank, {.compression = compression}, 4, folder.at("sharded"));
      });
      for (const auto& found : {zero, sharded})
        for (const Values& values : found)
          for (size_t i = 0; i < values.size(); ++i) CHECK(at::equal(values[i], ddp.front()[i]));
    }
  }
}

TEST_CASE("replicas of shards code what they send to each other, and resume") {
  for (const Engine engine : {Engine::kGloo, Engine::kShm}) {
    const TemporaryFolder folder;
    const FsdpOptions options{.shard_among = 2,
                              .compression = Sign{.block = 64, .between = Between::kRanks}};
    const auto once = on_ranks<Values>(4, engine, [&](ThreadRank& rank) {
      return train_sharded(rank, options, 4, folder.at("saved"));
    });
    const auto through = on_ranks<Values>(4, engine, [&](ThreadRank& rank) {
      FsdpOptions given = options;
      given.communicator = rank.communicator;
      const Sequential plain = net();
      auto model = fully_shard(plain, given);
      SGD optimizer(model->parameters(), 0.1);
      for (int64_t step = 0; step < 4; ++step) {
        optimizer.zero_grad();
        loss_of(model->forward(batch(step, rank.where.rank))).backward();
        trireme::step(optimizer);
      }
      // Half of each weight, coded, and of the biases, as they are.
      const int64_t half = kWidth * kWidth / 2;
      TORCH_CHECK(model->last_step().sent_bytes == 2 * (half / 8 + half / 64 * 4 + kWidth / 2 * 4));
      return whole_values(*model, plain->parameters());
    });
    for (const auto& found : {once, through})
      for (const Values& values : found)
        for (size_t i = 0; i < values.size(); ++i) CHECK(at::equal(values[i], once.front()[i]));
  }
}

TEST_CASE("replicas of a pipeline have the gradients that DDP has with the same codes") {
  const Compression compression = Sign{.between = Between::kRanks};
  const auto ddp = on_ranks<Values>(
      2, Engine::kGloo, [&](ThreadRank& rank) { return train_ddp(rank, compression, 3); });
  const auto piped = on_ranks<Values>(4, Engine::kGloo, [&](ThreadRank& rank) {
    PipelineOptions options{.chunks = 1, .replicas = 2};
    options.compression = compression;
    Pipeline<> pipe(net(), rank.communicator, options);
    SGD optimizer(pipe->parameters(), 0.1);
    for (int64_t step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      const at::Tensor rows = batch(step, rank.where.rank / 2);
      pipe->step(rows, rows,
                 [](const at::Tensor& output, const at::Tensor&) { return loss_of(output); });
      optimizer.step();
    }
    TORCH_CHECK(pipe->last_step().sent_bytes > 0);
    return values_of(pipe->parameters());
  });
  for (int64_t rank = 0; rank < 4; ++rank)
    for (size_t i = 0; i < 2; ++i)
      CHECK(at::equal(piped[static_cast<size_t>(rank)][i],
                      ddp.front()[static_cast<size_t>(rank % 2) * 2 + i]));
}

TEST_CASE("compression is refused where nobody would follow it") {
  const Compression int8 = Int8{.between = Between::kRanks};
  const auto refused = [](const std::string& part, const std::function<void()>& call) {
    try {
      call();
    } catch (const c10::ValueError& error) {
      return std::string(error.what()).find(part) != std::string::npos;
    }
    return false;
  };
  const auto all = on_ranks<bool>(2, Engine::kGloo, [&](ThreadRank& rank) {
    TORCH_CHECK(refused("stage 1", [&] {
      ZeroRedundancyOptimizer<SGD>(*net(), torch::optim::SGDOptions(0.1), rank.communicator,
                                   {.compression = int8});
    }));
    TORCH_CHECK(refused("on rank 1", [&] {
      FsdpOptions options{.communicator = rank.communicator};
      if (rank.where.rank == 0) options.compression = int8;
      fully_shard(net(), options);
    }));
    TORCH_CHECK(refused("inside of another one", [&] {
      using Inner = DistributedDataParallel<Sequential>;
      const Inner inner(net(), rank.communicator, DdpOptions{.compression = int8});
      DistributedDataParallel<Inner>(inner, rank.communicator);
    }));
    return true;
  });
  CHECK(all == std::vector<bool>(2, true));
}

}  // namespace trireme::compressed_test
