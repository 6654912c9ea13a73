// Freeze over C++ modules: every strategy against one process that freezes alike.

#include <trireme/pipetransformer/freeze.h>

#include <trireme/strategies/ddp/distributed_data_parallel.h>
#include <trireme/strategies/fsdp/fully_shard.h>
#include <trireme/strategies/pipeline/pipeline.h>
#include <trireme/strategies/zero/zero_redundancy_optimizer.h>

#include <torch/nn.h>
#include <torch/optim.h>
#include <torch/serialize.h>

#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <thread_ranks.h>
#include <vector>

#include "catch_torch.h"

namespace trireme::freeze_test {

using test::Engine;
using test::ThreadRank;
using torch::nn::Dropout;
using torch::nn::Linear;
using torch::nn::Sequential;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using Values = std::vector<at::Tensor>;
using Counts = std::vector<int64_t>;

namespace {

constexpr int64_t kLayers = 5;
constexpr int64_t kWidth = 4;

Sequential make_net() {
  Sequential net;
  for (int64_t i = 0; i < kLayers; ++i) net->push_back(Linear(kWidth, kWidth));
  const at::NoGradGuard no_grad;
  int64_t number = 0;  // ranks are threads of one generator
  for (at::Tensor& parameter : net->parameters())
    parameter.copy_(at::sin(at::arange(parameter.numel()) + ++number).view_as(parameter));
  return net;
}

AdamWOptions options() { return AdamWOptions(0.02).weight_decay(0.3); }

at::Tensor batch_of(int64_t step, RankOf where) {
  return at::cos(at::arange(12 * kWidth) * (step + 1.5))
      .view({12, kWidth})
      .tensor_split(where.world)[static_cast<size_t>(where.rank)]
      .clone();
}

at::Tensor loss_of(const at::Tensor& output) { return output.square().mean(); }

// Trains for five intervals of three steps; returns the history, then the values of parameters.
struct Run {
  Counts history;
  Values values;
};

struct Program {
  std::function<void(int64_t step)> backward;
  std::function<void()> step;
  std::function<void()> zero_grad;
};

Counts train(Freeze& freeze, const Program& program) {
  for (int64_t interval = 0; interval < 5; ++interval) {
    freeze.train();
    for (int64_t step = 0; step < 3; ++step) {
      program.zero_grad();
      program.backward(3 * interval + step);
      freeze.step();
      program.step();
    }
    if (interval == 3) freeze.unfreeze(freeze.frozen() - 1);
    freeze.advance();
  }
  return freeze.history();
}

Run alone(const FreezeOptions& given) {
  Sequential net = make_net();
  AdamW optimizer(net->parameters(), options());
  Freeze freeze(net, {"0", "1", "2", "3", "4"}, given, &optimizer);
  const Counts history = train(
      freeze, {[&](int64_t step) { loss_of(net->forward(batch_of(step, {0, 1}))).backward(); },
               [&] { optimizer.step(); }, [&] { optimizer.zero_grad(); }});
  return {history, net->parameters()};
}

using Strategy = std::function<Run(ThreadRank&, const FreezeOptions&)>;

Run ddp(ThreadRank& rank, const FreezeOptions& given) {
  Sequential net = make_net();
  DistributedDataParallel<Sequential> model(net, rank.communicator);
  AdamW optimizer(net->parameters(), options());
  Freeze freeze(model, {}, given, &optimizer);
  const Counts history =
      train(freeze,
            {[&](int64_t step) { loss_of(model->forward(batch_of(step, rank.where))).backward(); },
             [&] { optimizer.step(); }, [&] { optimizer.zero_grad(); }});
  return {history, net->parameters()};
}

Run zero(ThreadRank& rank, const FreezeOptions& given, int64_t stage) {
  Sequential net = make_net();
  std::optional<DistributedDataParallel<Sequential>> wrapped;
  if (stage == 1) wrapped.emplace(net, rank.communicator);
  ZeroRedundancyOptimizer<AdamW> optimizer(net->parameters(), options(), rank.communicator,
                                           {.stage = stage});
  std::shared_ptr<torch::nn::Module> model = net.ptr();
  if (wrapped) model = wrapped->ptr();
  Freeze freeze(model, {}, given, &optimizer);
  const Counts history =
      train(freeze, {[&](int64_t step) {
                       const at::Tensor x = batch_of(step, rank.where);
                       loss_of(wrapped ? (*wrapped)->forward(x) : net->forward(x)).backward();
                     },
                     [&] { optimizer.step(); }, [&] { optimizer.zero_grad(); }});
  Values values;
  for (const at::Tensor& value : net->parameters()) values.push_back(value.detach().clone());
  return {history, values};
}

Run sharded(ThreadRank& rank, FreezeOptions given) {
  Sequential net;
  const Sequential plain = make_net();
  for (const auto& child : plain->children())
    net->push_back(fully_shard(Linear(std::dynamic_pointer_cast<torch::nn::LinearImpl>(child)),
                               {.communicator = rank.communicator}));
  auto model = fully_shard(net, {.communicator = rank.communicator});
  AdamW optimizer(model->parameters(), options());
  Freeze freeze(model, {"0", "1", "2", "3", "4"}, std::move(given), &optimizer);
  const Counts history =
      train(freeze,
            {[&](int64_t step) { loss_of(model->forward(batch_of(step, rank.where))).backward(); },
             [&] { trireme::step(optimizer); }, [&] { optimizer.zero_grad(); }});
  model->unshard();
  Values values;
  for (const at::Tensor& value : plain->parameters()) values.push_back(value.detach().clone());
  model->reshard();
  return {history, values};
}

void expect_as_one_process(const Strategy& strategy, Engine engine) {
  for (const std::string rule : {"gradient", "schedule"}) {
    const FreezeOptions given{.rule = rule, .measure_every = 2};
    const Run one = alone(given);
    std::vector<Run> found(2);
    test::run_thread_ranks(
        2,
        [&](ThreadRank& rank) {
          found[static_cast<size_t>(rank.where.rank)] = strategy(rank, given);
        },
        std::chrono::seconds(30), engine);
    for (const Run& run : found) {
      CHECK(run.history == one.history);
      REQUIRE(run.values.size() == one.values.size());
      for (size_t i = 0; i < run.values.size(); ++i)
        CHECK(at::allclose(run.values[i], one.values[i], 1e-4, 1e-5));
    }
  }
}

}  // namespace

TEST_CASE("DistributedDataParallel freezes as one process does") {
  expect_as_one_process(ddp, Engine::kGloo);
}

TEST_CASE("ZeRO freezes as one process does") {
  for (const int64_t stage : {1, 2}) {
    expect_as_one_process(
        [stage](ThreadRank& rank, const FreezeOptions& given) { return zero(rank, given, stage); },
        Engine::kShm);
  }
}

TEST_CASE("fully_shard freezes as one process does") {
  expect_as_one_process(sharded, Engine::kShm);
}

TEST_CASE("a frozen layer is evaluated, has no gradients and no state") {
  torch::manual_seed(3);
  Sequential net(Linear(4, 4), Dropout(0.5), Linear(4, 4), Dropout(0.5), Linear(4, 4));
  AdamW optimizer(net->parameters(), options());
  Freeze freeze(net, {}, {.rule = "schedule"}, &optimizer);
  const auto train_once = [&] {
    optimizer.zero_grad();
    loss_of(net->forward(batch_of(0, {0, 1}))).backward();
    freeze.step();
    optimizer.step();
  };
  train_once();
  CHECK(optimizer.state().size() == 6);
  CHECK(freeze.state().layers == std::vector<std::string>{"0 + 1", "2 + 3", "4"});
  CHECK(freeze.advance() == 1);
  CHECK(optimizer.state().size() == 4);
  CHECK(!net->ptr(1)->is_training());
  CHECK(net->ptr(3)->is_training());
  const at::Tensor before = net->parameters().front().detach().clone();
  train_once();
  CHECK(net->parameters().front().equal(before));
  net->train();
  CHECK_THAT(test::error_of(train_once),
             Catch::Contains("got frozen layer '0 + 1' in training mode"));
  freeze.train();
  train_once();
  freeze.unfreeze(0);
  CHECK(net->ptr(1)->is_training());
  train_once();
  CHECK(!net->parameters().front().equal(before));
}

TEST_CASE("how far freezing has come is saved and loaded") {
  Sequential net = make_net();
  Freeze freeze(net, {}, {.alpha = 0.5, .rule = "schedule"});
  freeze.advance();
  freeze.advance();
  torch::serialize::OutputArchive out;
  freeze.save(out);
  std::stringstream stream;
  out.save_to(stream);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  Sequential again = make_net();
  Freeze other(again, {}, {.alpha = 0.5, .rule = "schedule"});
  other.load(in);
  CHECK(other.history() == freeze.history());
  CHECK(other.frozen() == freeze.frozen());
  CHECK(!again->parameters().front().requires_grad());
  CHECK(other.advance() == freeze.advance());
}

TEST_CASE("what Freeze refuses") {
  const auto refuses = [](const std::string& text, const auto& make) {
    CHECK_THAT(test::error_of(make), Catch::Contains(text));
  };
  Sequential net = make_net();
  refuses("got '9' as a layer", [&] { Freeze(net, {"0", "9"}); });
  refuses("got '0' as a layer, which lies in '0'", [&] { Freeze(net, {"0", "0"}); });
  refuses("not in the model", [&] { Freeze(net, {FreezeLayer(Linear(2, 2))}); });
  refuses("got alpha 2", [&] { Freeze(net, {}, {.alpha = 2}); });
  refuses("got rule 'norm'", [&] { Freeze(net, {}, {.rule = "norm"}); });
  refuses("without a Sequential", [&] { Freeze(Linear(2, 2)); });
  AdamW foreign(make_net()->parameters());
  refuses("got an optimizer without '0.weight'", [&] { Freeze(net, {}, {}, &foreign); });
  Sequential tied = make_net();
  tied->ptr<torch::nn::LinearImpl>(3)->weight =
      tied->ptr<torch::nn::LinearImpl>(3)->register_parameter(
          "again", tied->ptr<torch::nn::LinearImpl>(1)->weight);
  refuses("got parameter '1.weight', which is '3.again' as well", [&] { Freeze(tied, {}); });
}

TEST_CASE("layers of a pipeline freeze on all ranks") {
  std::vector<Counts> found(2);
  std::vector<std::string> wrong(2);
  test::run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        const auto at = static_cast<size_t>(rank.where.rank);
        Sequential net = make_net();
        Pipeline<> pipe(net, rank.communicator, {.chunks = 2, .schedule = "1f1b"});
        AdamW optimizer(pipe->parameters(), options());
        Freeze freeze(pipe, {"0", "1", "2", "3", "4"}, {.alpha = 0.5, .measure_every = 1},
                      &optimizer);
        for (int64_t interval = 0; interval < 3; ++interval) {
          optimizer.zero_grad();
          const at::Tensor x = batch_of(interval, {0, 1});
          pipe->step(x, x, [](const at::Tensor& output, const at::Tensor& /*target*/) {
            return loss_of(output);
          });
          freeze.step();
          optimizer.step();
          freeze.advance();
        }
        found[at] = freeze.history();
        for (const auto& item : pipe->named_parameters())
          if (item.value().requires_grad() != (std::stoll(item.key()) >= freeze.frozen()))
            wrong[at] += item.key() + " ";
      },
      std::chrono::seconds(30), Engine::kShm);
  CHECK(found[0] == found[1]);
  CHECK(found[0].back() > 0);
  CHECK(found[0].back() < kLayers);
  CHECK(wrong == std::vector<std::string>(2));
}

}  // namespace trireme::freeze_test
