// What moves or rewrites parameters inside of writing(): taken over, and the next step is that of
// one process.

#include <torch/nn/utils.h>
#include <torch/serialize.h>

#include <catch_torch.h>
#include <functional>
#include <optional>
#include <sstream>
#include <strategies/zero/zero_ranks.h>
#include <vector>

namespace trireme::moved_parameters_test {

using namespace trireme::test;
using torch::optim::SGD;
using torch::optim::SGDOptions;

namespace {

constexpr double kFactor = 0.9;

template <typename Write>
void for_each_parameter(UnevenNet& net, const Write& write) {
  const at::NoGradGuard no_grad;
  for (at::Tensor& parameter : net->parameters()) write(parameter);
}

// Autograd forgets the node of each parameter.
void load(UnevenNet& net) {
  UnevenNet changed;
  const Values now = values_of(net->parameters());
  for (size_t i = 0; i < now.size(); ++i)
    changed->parameters()[i].set_data(now[i].detach() * kFactor);
  std::stringstream file;
  torch::save(changed, file);
  torch::load(net, file);
}

struct Program {
  const char* name;
  std::function<void(UnevenNet&)> change;
};

const std::vector<Program>& programs() {
  static const std::vector<Program> all = {
      {"in place",
       [](UnevenNet& net) { for_each_parameter(net, [](at::Tensor& it) { it.mul_(kFactor); }); }},
      {"through data()",
       [](UnevenNet& net) {
         for_each_parameter(net, [](at::Tensor& it) { it.data().mul_(kFactor); });
       }},
      {"torch::load", load},
      {"set_data()",
       [](UnevenNet& net) {
         for_each_parameter(net, [](at::Tensor& it) { it.set_data(it.detach() * kFactor); });
       }},
      {"set_()",
       [](UnevenNet& net) {
         for_each_parameter(net, [](at::Tensor& it) { it.set_(it.detach() * kFactor); });
       }},
      {"to() and back",
       [](UnevenNet& net) {
         net->to(at::kDouble);
         for_each_parameter(net, [](at::Tensor& it) { it.mul_(kFactor); });
         net->to(at::kFloat);
       }},
      {"parts of a vector",
       [](UnevenNet& net) {
         const at::NoGradGuard no_grad;
         const Values parameters = net->parameters();
         torch::nn::utils::vector_to_parameters(
             torch::nn::utils::parameters_to_vector(parameters) * kFactor, parameters);
       }},
      {"frozen meanwhile",
       [](UnevenNet& net) {
         net->first->weight.set_requires_grad(false);
         for_each_parameter(net, [](at::Tensor& it) { it.mul_(kFactor); });
         net->first->weight.set_requires_grad(true);
       }},
  };
  return all;
}

// Changes before the first step, after one, and between a backward and its step. Gradients stay.
template <typename Change, typename Backward, typename Optimizer>
void train_and_change(const Change& change, const Backward& backward, Optimizer& optimizer) {
  change();
  backward(0);
  optimizer.step();
  optimizer.zero_grad();
  backward(1);
  optimizer.step();
  change();
  backward(2);
  optimizer.step();
  backward(3);
  change();
  optimizer.step();
  optimizer.zero_grad();
  backward(4);
  optimizer.step();
}

Values change_alone(const Program& program) {
  UnevenNet net;
  SGD optimizer(net->parameters(), SGDOptions(0.1).momentum(0.9));
  train_and_change([&] { program.change(net); },
                   [&](int64_t step) { net->forward(whole_batch(step)).backward(); }, optimizer);
  return values_of(net->parameters());
}

Values change_sharded(ThreadRank& rank, const Program& program, int64_t stage) {
  UnevenNet net;
  std::optional<DistributedDataParallel<UnevenNet>> ddp;
  if (stage < 2) ddp.emplace(net, rank.communicator);
  const SGDOptions options = SGDOptions(0.1).momentum(0.9);
  const auto backward = [&](int64_t step) {
    const at::Tensor part = part_of_batch(step, rank.where);
    (ddp ? (*ddp)->forward(part) : net->forward(part)).backward();
  };
  if (stage == 0) {
    SGD optimizer(net->parameters(), options);
    train_and_change([&] { program.change(net); }, backward, optimizer);
    return values_of(net->parameters());
  }
  ZeroRedundancyOptimizer<SGD> optimizer(net, options, rank.communicator, {.stage = stage});
  const auto change = [&] {
    const auto writing = optimizer.writing();
    program.change(net);
  };
  train_and_change(change, backward, optimizer);
  return values_of(net->parameters());
}

}  // namespace

TEST_CASE("what moves parameters inside writing() is taken over: DDP alone, ZeRO 1 and 2") {
  for (const Program& program : programs()) {
    const Values expected = change_alone(program);
    for (const Engine engine : {Engine::kGloo, Engine::kShm}) {
      for (const int64_t stage : {0, 1, 2}) {
        CAPTURE(program.name, static_cast<int>(engine), stage);
        const auto found = on_ranks<Values>(
            2, engine, [&](ThreadRank& rank) { return change_sharded(rank, program, stage); });
        for (const Values& values : found) CHECK(count_unlike(values, expected) == 0);
        CHECK(count_unlike(found[0], found[1], 0) == 0);
      }
    }
  }
}

}  // namespace trireme::moved_parameters_test
