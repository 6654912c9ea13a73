// An elastic run against one process that freezes alike, on threads as ranks.

#include <trireme/pipetransformer/pipe_transformer.h>

#include <trireme/pipetransformer/freeze_rule.h>
#include <trireme/pipetransformer/layer_memory.h>
#include <trireme/saving/module_checkpoint.h>

#include <torch/nn.h>
#include <torch/optim.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <pipetransformer/wrong.h>
#include <string>
#include <temporary_folder.h>
#include <thread_ranks.h>
#include <vector>

#include "catch_torch.h"

namespace trireme::pipe_transformer_test {

using namespace trireme::test;
using torch::nn::Sequential;
using Numbers = std::vector<int64_t>;
using Strings = std::vector<std::string>;
using Values = std::vector<at::Tensor>;

namespace {

constexpr int64_t kLayers = 12, kWidth = 4, kRows = 32, kSteps = 3, kEpochs = 7, kSamples = 96;
const auto kDouble = at::TensorOptions().dtype(at::kDouble);

// Whole numbers in, whole numbers out, and gradients that depend on both.
struct ShiftImpl : torch::nn::Module {
  explicit ShiftImpl(int64_t number)
      : shift(register_parameter("shift", at::arange(kWidth, kDouble) - 3 * number % 7)),
        calls(register_buffer("calls", at::zeros({}, at::kLong))) {}
  at::Tensor forward(const at::Tensor& input) { return (input + shift).abs(); }
  at::Tensor shift, calls;
};
TORCH_MODULE(Shift);

Sequential make_net(int64_t offset = 0) {
  Sequential net;
  for (int64_t i = 0; i < kLayers; ++i) net->push_back(Shift(i + offset));
  return net;
}

// The rows of an epoch's step are other samples in each epoch.
at::Tensor ids_of(int64_t step) {
  return (at::arange(kRows, at::kLong) * 5 + step * kRows).remainder(kSamples);
}
at::Tensor inputs_of(const at::Tensor& ids) {
  return (ids.view({-1, 1}) * at::arange(1, kWidth + 1)).remainder(11).to(at::kDouble);
}
at::Tensor targets_of(const at::Tensor& ids) {
  return kRows * ((ids.view({-1, 1}) + at::arange(kWidth)).remainder(5) - 2).to(at::kDouble);
}
at::Tensor loss_of(const at::Tensor& output, const at::Tensor& target) {
  return (output * target).sum(1).mean();
}

// Momentum 1 keeps whole numbers whole.
std::unique_ptr<torch::optim::Optimizer> whole_sgd(const Sequential& net) {
  return std::make_unique<torch::optim::SGD>(net->parameters(),
                                             torch::optim::SGDOptions(1).momentum(1));
}
std::unique_ptr<torch::optim::Optimizer> adamw(const Sequential& net) {
  return std::make_unique<torch::optim::AdamW>(
      net->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1).amsgrad(true));
}
using MakeOptimizer = decltype(&whole_sgd);

struct Result {
  std::vector<double> losses;
  Values parameters;
  double evaluated = 0;  // the loss of the first batch, in the end
};

// One process; `schedule` says how many layers are frozen in each epoch.
Result train_alone(const Numbers& schedule, MakeOptimizer make_optimizer) {
  Sequential net = make_net();
  const auto optimizer = make_optimizer(net);
  Result result;
  for (int64_t step = 0; step < kSteps * static_cast<int64_t>(schedule.size()); ++step) {
    const int64_t frozen = schedule[static_cast<size_t>(step / kSteps)];
    for (int64_t layer = 0; layer < frozen; ++layer) {
      at::Tensor shift = net->children()[static_cast<size_t>(layer)]->parameters().front();
      shift.set_requires_grad(false);
      shift.mutable_grad().reset();
    }
    const at::Tensor ids = ids_of(step);
    optimizer->zero_grad();
    const at::Tensor loss = loss_of(net->forward(inputs_of(ids)), targets_of(ids));
    loss.backward();
    optimizer->step();
    result.losses.push_back(loss.item<double>());
  }
  result.parameters = net->parameters();
  const at::NoGradGuard no_grad;
  result.evaluated =
      loss_of(net->forward(inputs_of(ids_of(0))), targets_of(ids_of(0))).item<double>();
  return result;
}

// What freezing by the schedule of 1/3 leaves, where the last layer stays.
Numbers frozen_by_epoch() {
  Numbers frozen = freeze_schedule(kLayers, 1.0 / 3, kEpochs);
  for (int64_t& count : frozen) count = std::min(count, kLayers - 1);
  return frozen;
}

PipeTransformerOptions options_of() {
  PipeTransformerOptions options;
  options.global_batch = kRows;
  options.chunks = 8;
  options.freeze = FreezeOptions{.rule = "schedule"};
  options.costs.assign(kLayers, 1.0);
  return options;
}

void run_epochs(PipeTransformerImpl& run, int64_t first, int64_t end, std::vector<double>& losses) {
  for (int64_t epoch = first; epoch < end; ++epoch) {
    for (int64_t step = epoch * kSteps; step < (epoch + 1) * kSteps; ++step) {
      const at::Tensor ids = ids_of(step);
      losses.push_back(run.step(inputs_of(ids), ids, targets_of(ids)).item<double>());
    }
    run.end_epoch();
  }
}

void check_parameters(const Sequential& net, const Values& expected, const IndexRange& own,
                      Wrong& wrong, double tolerance = 0) {
  const Values parameters = net->parameters();
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    const at::Tensor& parameter = parameters[static_cast<size_t>(layer)];
    const bool is_held = layer >= own.begin && layer < own.end;
    wrong.unless(has_memory(parameter) == is_held, c10::str("memory of layer ", layer));
    if (!is_held || !has_memory(parameter)) continue;
    const bool is_equal =
        at::allclose(parameter, expected[static_cast<size_t>(layer)], tolerance, tolerance);
    wrong.unless(is_equal, c10::str("layer ", layer, " is ", parameter, ", not ",
                                    expected[static_cast<size_t>(layer)]));
  }
}

IndexRange own_layers(const ElasticPlan& plan, int64_t rank) {
  int64_t first = 0;
  const int64_t part = rank % plan.ranks_per_pipeline;
  for (int64_t i = 0; i < part; ++i) first += plan.balance[static_cast<size_t>(i)];
  return {first, first + plan.balance[static_cast<size_t>(part)]};
}

struct Variant {
  std::string name;
  Engine engine = Engine::kShm;
  MakeOptimizer make_optimizer = &whole_sgd;
  double tolerance = 0;
  bool has_cache = false;
  std::function<void(PipeTransformerOptions&)> change = [](PipeTransformerOptions&) {};
};

void check_variant(const Variant& variant, const Numbers& plans) {
  const Result alone = train_alone(frozen_by_epoch(), variant.make_optimizer);
  Wrong wrong;
  run_thread_ranks(
      4,
      [&](ThreadRank& own) {
        const int64_t rank = own.where.rank;
        Sequential net = make_net(rank);  // rank 0's values count
        const auto optimizer = variant.make_optimizer(net);
        PipeTransformerOptions options = options_of();
        variant.change(options);
        if (variant.has_cache)
          options.cache = std::make_shared<ActivationCache>(kSamples, 1 << 20, own.communicator);
        PipeTransformer<> run(net, own.communicator, loss_of, *optimizer, options);
        std::vector<double> losses;
        run_epochs(*run, 0, kEpochs, losses);
        for (size_t i = 0; i < losses.size(); ++i)
          wrong.unless(
              std::abs(losses[i] - alone.losses[i]) <=
                  variant.tolerance * std::abs(alone.losses[i]),
              c10::str(variant.name, ": loss ", i, " is ", losses[i], ", not ", alone.losses[i]));
        const double evaluated =
            run->eval_step(inputs_of(ids_of(0)), targets_of(ids_of(0))).item<double>();
        wrong.unless(
            std::abs(evaluated - alone.evaluated) <= variant.tolerance * std::abs(alone.evaluated),
            c10::str(variant.name, ": evaluated as ", evaluated, ", not ", alone.evaluated));
        Numbers ranks;
        for (const ElasticEpoch& epoch : run->history()) ranks.push_back(epoch.ranks_per_pipeline);
        wrong.unless(ranks == plans, c10::str(variant.name, ": plans of ", ranks, " ranks"));
        check_parameters(net, alone.parameters, own_layers(run->plan(), rank), wrong,
                         variant.tolerance);
        if (variant.has_cache)
          wrong.unless(run->history().back().hits > 0, variant.name + ": no hits");
      },
      std::chrono::seconds(60), variant.engine);
  CHECK(wrong.found() == Strings{});
}

}  // namespace

TEST_CASE("an elastic run equals one process that freezes alike, bit for bit") {
  check_variant({"shared memory"}, {4, 4, 4, 2, 2, 1, 1});
  check_variant({"gloo", Engine::kGloo}, {4, 4, 4, 2, 2, 1, 1});
}

TEST_CASE("an elastic run with a cache equals one process bit for bit") {
  check_variant({"cache", Engine::kShm, &whole_sgd, 0, true}, {4, 4, 2, 1, 1, 1, 1});
}

TEST_CASE("an elastic run follows its switches, schedules and optimizers") {
  check_variant({"adamw", Engine::kShm, &adamw, 1e-9}, {4, 4, 4, 2, 2, 1, 1});
  check_variant({"gpipe", Engine::kShm, &whole_sgd, 0, false,
                 [](PipeTransformerOptions& options) { options.schedule = "gpipe"; }},
                {4, 4, 4, 2, 2, 1, 1});
  check_variant({"a fixed pipeline with a cache", Engine::kShm, &whole_sgd, 0, true,
                 [](PipeTransformerOptions& options) { options.pipe = options.replicas = false; }},
                {4, 4, 4, 4, 4, 4, 4});
}

TEST_CASE("an elastic run measures its layers, and goes on where a rule freezes nothing") {
  const Result alone = train_alone(Numbers(2, 0), &whole_sgd);
  Wrong wrong;
  run_thread_ranks(
      4,
      [&](ThreadRank& own) {
        Sequential net = make_net(own.where.rank);
        const auto optimizer = whole_sgd(net);
        PipeTransformerOptions options = options_of();
        options.costs.clear();
        options.freeze.reset();
        PipeTransformer<> run(net, own.communicator, loss_of, *optimizer, options);
        wrong.unless_says(text_of_error([&] { run->freeze_state(); }), "a run without freezing");
        std::vector<double> losses;
        run_epochs(*run, 0, 2, losses);
        wrong.unless(losses == alone.losses, "the losses");
        wrong.unless(run->plan().ranks_per_pipeline == 4 && run->plan().seconds > 0, "the plan");
        check_parameters(net, alone.parameters, own_layers(run->plan(), own.where.rank), wrong);
      },
      std::chrono::seconds(60), Engine::kShm);
  CHECK(wrong.found() == Strings{});
}

TEST_CASE("a transform to any plan and back leaves parameters and optimizer as they were") {
  const Numbers schedule(4, 0);
  const Result alone = train_alone(schedule, &adamw);
  const std::vector<ElasticPlan> plans = {{1, 4, {12}}, {4, 1, {1, 2, 3, 6}}, {2, 2, {7, 5}}};
  Wrong wrong;
  run_thread_ranks(
      4,
      [&](ThreadRank& own) {
        Sequential net = make_net();
        const auto optimizer = adamw(net);
        PipeTransformerOptions options = options_of();
        options.freeze.reset();
        PipeTransformer<> run(net, own.communicator, loss_of, *optimizer, options);
        std::vector<double> losses;
        const Values parameters = net->parameters();
        for (size_t i = 0; i <= plans.size(); ++i) {
          run_epochs(*run, static_cast<int64_t>(i), static_cast<int64_t>(i) + 1, losses);
          if (i < plans.size()) run->transform(plans[i]);
        }
        const Values after = net->parameters();
        for (size_t i = 0; i < after.size(); ++i)
          wrong.unless(after[i].is_same(parameters[i]), "another parameter");
        for (size_t i = 0; i < losses.size(); ++i)
          wrong.unless(std::abs(losses[i] - alone.losses[i]) < 1e-9 * std::abs(alone.losses[i]),
                       c10::str("loss ", i, " is ", losses[i], ", not ", alone.losses[i]));
        const std::string refused = text_of_error([&] { run->transform({2, 1, {6, 6}}); });
        wrong.unless_says(refused,
                          "got the plan 2 x 1 of 6 6 layers for 4 ranks under the plan "
                          "2 x 2 of 7 5 layers");
        const ElasticPlan other{4, 1,
                                own.where.rank == 3 ? Numbers{3, 3, 3, 3} : Numbers{2, 4, 3, 3}};
        wrong.unless_says(text_of_error([&] { run->transform(other); }),
                          "ranks with other plans: 'the plan 4 x 1 of 2 4 3 3 layers' on rank 0");
        run_epochs(*run, 3, 4, losses);  // the plan before goes on
      },
      std::chrono::seconds(60), Engine::kShm);
  CHECK(wrong.found() == Strings{});
}

TEST_CASE("a checkpoint of an elastic run loads under another plan") {
  const TemporaryFolder folder;
  const std::string path = folder.at("checkpoint");
  const Result alone = train_alone(frozen_by_epoch(), &whole_sgd);
  Wrong wrong;
  run_thread_ranks(
      4,
      [&](ThreadRank& own) {
        Sequential net = make_net();
        const auto optimizer = whole_sgd(net);
        PipeTransformer<> run(net, own.communicator, loss_of, *optimizer, options_of());
        std::vector<double> losses;
        run_epochs(*run, 0, 4, losses);
        save_checkpoint(path, *run,
                        {.optimizer = optimizer.get(), .communicator = own.communicator});
      },
      std::chrono::seconds(60), Engine::kShm);
  for (const int64_t world : {1, 2}) {
    run_thread_ranks(
        world,
        [&](ThreadRank& own) {
          Sequential net = make_net(3);
          const auto optimizer = whole_sgd(net);
          PipeTransformer<> run(net, own.communicator, loss_of, *optimizer, options_of());
          load_checkpoint(path, *run,
                          {.optimizer = optimizer.get(), .communicator = own.communicator});
          wrong.unless(run->frozen() == 10, c10::str("frozen ", run->frozen()));
          std::vector<double> losses;
          run_epochs(*run, 4, kEpochs, losses);
          for (size_t i = 0; i < losses.size(); ++i)
            wrong.unless(losses[i] == alone.losses[i + 4 * kSteps],
                         c10::str("loss ", i, " on ", world, " ranks"));
          check_parameters(net, alone.parameters, own_layers(run->plan(), own.where.rank), wrong);
        },
        std::chrono::seconds(60), Engine::kShm);
  }
  CHECK(wrong.found() == Strings{});
}

TEST_CASE("a loss that throws on one rank ends the step on all, and the next one works") {
  Wrong wrong;
  const Result alone = train_alone(frozen_by_epoch(), &whole_sgd);
  run_thread_ranks(
      4,
      [&](ThreadRank& own) {
        Sequential net = make_net();
        const auto optimizer = whole_sgd(net);
        bool throws = false;
        const auto loss = [&](const at::Tensor& output, const at::Tensor& target) {
          TORCH_CHECK(!throws, "no loss here");
          return loss_of(output, target);
        };
        PipeTransformer<> run(net, own.communicator, loss, *optimizer, options_of());
        std::vector<double> losses;
        for (const int64_t epoch : {0, 3, 5}) {  // behind the plans 4 x 1, 2 x 2, 1 x 4
          run_epochs(*run, static_cast<int64_t>(losses.size()) / kSteps, epoch, losses);
          throws = own.where.rank == 3;
          const at::Tensor ids = ids_of(0);
          const std::string text =
              text_of_error([&] { run->step(inputs_of(ids), ids, targets_of(ids)); });
          wrong.unless_says(text, "no loss here");
          throws = false;
        }
        run_epochs(*run, 5, kEpochs, losses);
        for (size_t i = 0; i < losses.size(); ++i)
          wrong.unless(losses[i] == alone.losses[i], c10::str("loss ", i));
      },
      std::chrono::seconds(60), Engine::kShm);
  CHECK(wrong.found() == Strings{});
}

TEST_CASE("an elastic run refuses bad input on all ranks") {
  Wrong wrong;
  run_thread_ranks(
      4,
      [&](ThreadRank& own) {
        const int64_t rank = own.where.rank;
        const auto text_for = [&](Sequential net, torch::optim::Optimizer& optimizer) {
          return text_of_error([&] {
            PipeTransformer<> run(std::move(net), own.communicator, loss_of, optimizer,
                                  options_of());
          });
        };
        Sequential net = make_net();
        torch::optim::SGD some({net->parameters().front()}, 1);
        const auto all = whole_sgd(net);
        wrong.unless_says(text_for(net, rank == 2 ? some : *all), "an optimizer without '1.shift'");
        torch::optim::SGD more({at::zeros({2}, at::requires_grad())}, 1);
        more.add_param_group(torch::optim::OptimizerParamGroup(net->parameters()));
        wrong.unless_says(text_for(net, more), "got an optimizer of 1 parameters");
        torch::optim::LBFGS unknown(net->parameters());
        wrong.unless_says(text_for(net, unknown), "a class whose states are not known");
        Sequential tied = make_net();
        tied->push_back(*tied->begin());
        wrong.unless_says(text_for(tied, *whole_sgd(tied)),
                          "got '12.shift', which is '0.shift' as well");

        PipeTransformer<> run(net, own.communicator, loss_of, *all, options_of());
        const at::Tensor ids = ids_of(0), inputs = inputs_of(ids), targets = targets_of(ids);
        const int64_t rows = rank == 1 ? kRows - 1 : kRows;
        wrong.unless_says(
            text_of_error(
                [&] { run->step(inputs.narrow(0, 0, rows), targets.narrow(0, 0, rows)); }),
            "got a batch of 31 rows, expected the global batch of 32 under the plan 4 x 1");
        wrong.unless_says(text_of_error([&] { run->step(inputs, targets.narrow(0, 0, 4)); }),
                          "got a batch of 4 rows");
        wrong.unless_says(text_of_error([&] { run->step(inputs, ids.narrow(0, 0, 4), targets); }),
                          "got ids as Long of sizes [4]");
        run->step(inputs, targets);
      },
      std::chrono::seconds(60), Engine::kShm);
  CHECK(wrong.found() == Strings{});
}

}  // namespace trireme::pipe_transformer_test
