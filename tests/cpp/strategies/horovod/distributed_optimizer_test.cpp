// Horovod's API for C++, ranks as threads over both engines: N ranks must train as one process does
// on the whole batch.

#include <trireme/horovod.h>

#include <catch_torch.h>
#include <strategies/zero/zero_ranks.h>
#include <string>
#include <utility>
#include <vector>

namespace trireme::distributed_optimizer_test {

using namespace trireme::test;
using horovod::AllreduceOptions;
using horovod::DistributedOptimizer;
using horovod::DistributedOptimizerOptions;
using horovod::Op;
using horovod::Session;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

namespace {

constexpr Engine kEngines[] = {Engine::kGloo, Engine::kShm};
constexpr int64_t kSteps = 4;

template <typename Optimizer, typename Options>
Values train_distributed(ThreadRank& rank, const Options& defaults,
                         const DistributedOptimizerOptions& options) {
  UnevenNet net;
  DistributedOptimizer<Optimizer> optimizer(net, defaults, rank.communicator, options);
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    for (int64_t pass = 0; pass < options.backward_passes_per_step; ++pass)
      net->forward(part_of_batch(step, rank.where), step % 2 == 0).backward();
    optimizer.step();
  }
  return values_of(net->parameters());
}

// One process on whole batches; the loss is multiplied.
template <typename Optimizer, typename Options>
Values train_one(const Options& defaults, double factor) {
  UnevenNet net;
  Optimizer optimizer(net->parameters(), defaults);
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    (factor * net->forward(whole_batch(step), step % 2 == 0)).backward();
    optimizer.step();
  }
  return values_of(net->parameters());
}

struct Case {
  DistributedOptimizerOptions options;
  double factor;
  double tolerance;
};

template <typename Optimizer, typename Options>
void check_case(const Case& one, int64_t world, Engine engine, const Options& defaults) {
  const Values expected = train_one<Optimizer>(defaults, one.factor);
  const auto found = on_ranks<Values>(world, engine, [&](ThreadRank& rank) {
    return train_distributed<Optimizer>(rank, defaults, one.options);
  });
  for (const Values& values : found)
    CHECK(count_unlike(values, expected, one.tolerance, one.tolerance) == 0);
}

}  // namespace

TEST_CASE("A distributed optimizer equals one process on the whole batch", "[horovod]") {
  const double world = 3;
  const std::vector<Case> cases = {
      {{}, 1, 1e-5},
      {{.gradient_predivide_factor = 2}, 1, 1e-5},
      {{.backward_passes_per_step = 2}, 2, 1e-5},
      {{.op = Op::kSum}, world, 1e-4},
      {{.compression = at::kHalf}, 1, 2e-2},
  };
  for (const Engine engine : kEngines) {
    for (const Case& one : cases) {
      check_case<SGD>(one, 3, engine, SGDOptions(0.1).momentum(0.9));
      check_case<AdamW>(one, 3, engine, AdamWOptions(1e-2));
    }
  }
  check_case<SGD>(cases[0], 1, Engine::kShm, SGDOptions(0.1));
}

TEST_CASE("Passes of a distributed optimizer are counted", "[horovod]") {
  const auto said = on_ranks<std::vector<std::string>>(2, Engine::kShm, [](ThreadRank& rank) {
    UnevenNet net;
    DistributedOptimizer<SGD> optimizer(net, SGDOptions(0.1), rank.communicator);
    const auto backward = [&] { net->forward(part_of_batch(0, rank.where)).backward(); };
    std::vector<std::string> errors;
    backward();
    errors.push_back(error_of(backward));
    errors.push_back(error_of([&] { optimizer.zero_grad(); }));
    optimizer.synchronize();
    {
      const auto skip = optimizer.skip_synchronize();
      optimizer.step();
    }
    optimizer.zero_grad();
    optimizer.set_backward_passes_per_step(2);
    backward();
    optimizer.step();  // reduces what there is
    optimizer.step([&] {
      optimizer.zero_grad();
      const at::Tensor loss = net->forward(part_of_batch(1, rank.where));
      loss.backward();
      return loss;
    });
    UnevenNet one;
    SGD plain(one->parameters(), SGDOptions(0.1));
    for (const int64_t step : {0, 0, 1}) {
      plain.zero_grad();
      one->forward(whole_batch(step)).backward();
      plain.step();
    }
    errors.push_back(
        std::to_string(count_unlike(values_of(net->parameters()), values_of(one->parameters()))));
    return errors;
  });
  for (const std::vector<std::string>& errors : said) {
    CHECK(errors[0].find("more than backward_passes_per_step times") != std::string::npos);
    CHECK(errors[1].find("optimizer.zero_grad() was called after") != std::string::npos);
    CHECK(errors[2] == "0");
  }
}

TEST_CASE("Gradients of a group that is added are reduced, too", "[horovod]") {
  const auto train = [](auto& optimizer, UnevenNet& net, const auto& rest, const auto& input) {
    for (int64_t step = 0; step < kSteps; ++step) {
      if (step == 1) optimizer.add_param_group(torch::optim::OptimizerParamGroup(rest));
      net->zero_grad();
      net->forward(input(step)).backward();
      optimizer.step();
    }
  };
  const auto split = [](UnevenNet& net) {
    const std::vector<at::Tensor> all = net->parameters();
    return std::pair(std::vector(all.begin(), all.begin() + 2),
                     std::vector(all.begin() + 2, all.end()));
  };
  UnevenNet one;
  const auto [first, rest] = split(one);
  SGD plain(first, SGDOptions(0.1));
  train(plain, one, rest, [](int64_t step) { return whole_batch(step); });
  const auto said = on_ranks<std::vector<std::string>>(2, Engine::kShm, [&](ThreadRank& rank) {
    UnevenNet net;
    const auto [own, added] = split(net);
    DistributedOptimizer<SGD> optimizer(own, SGDOptions(0.1), rank.communicator);
    train(optimizer, net, added, [&](int64_t step) { return part_of_batch(step, rank.where); });
    const auto unlike = count_unlike(values_of(net->parameters()), values_of(one->parameters()));
    const std::vector<at::Tensor> tensors{at::ones({2}).requires_grad_()};
    const torch::optim::OptimizerParamGroup more(tensors);
    net->forward(part_of_batch(0, rank.where)).backward();
    const std::string early = error_of([&] { optimizer.add_param_group(more); });
    optimizer.step();
    static_cast<torch::optim::Optimizer&>(optimizer).add_param_group(more);
    return std::vector{std::to_string(unlike), early, error_of([&] { optimizer.step(); })};
  });
  for (const std::vector<std::string>& texts : said) {
    CHECK(texts[0] == "0");
    CHECK(texts[1].find("to add between a backward and its step") != std::string::npos);
    CHECK(texts[2].find("parameters to step, expected the") != std::string::npos);
  }
}

TEST_CASE("Adasum combines what steps change", "[horovod]") {
  const at::Tensor a = at::tensor({1.0, 2.0, 0.0});
  const at::Tensor b = at::tensor({2.0, 0.0, 1.0});
  const at::Tensor expected = a * (1 - 2.0 / (2 * 5.0)) + b * (1 - 2.0 / (2 * 5.0));
  CHECK(at::allclose(horovod::adasum({a, b}), expected));
  CHECK(at::equal(horovod::adasum({a, at::zeros({3}, at::kDouble)}), a));
  CHECK(at::allclose(horovod::adasum({a, a, a, a}), a));
  CHECK(error_of<c10::ValueError>([&] { horovod::adasum({a, a, a}); }).find("over 3 ranks") !=
        std::string::npos);
  const auto found = on_ranks<Values>(2, Engine::kShm, [](ThreadRank& rank) {
    at::Tensor parameter = at::zeros({3}).set_requires_grad(true);
    DistributedOptimizer<SGD> optimizer(std::vector<at::Tensor>{parameter}, SGDOptions(1.0),
                                        rank.communicator, {.op = Op::kAdasum});
    const at::Tensor own =
        rank.where.rank == 0 ? at::tensor({1.0F, 2.0F, 0.0F}) : at::tensor({2.0F, 0.0F, 1.0F});
    (parameter * own).sum().backward();
    optimizer.step();
    return Values{parameter.detach().clone()};
  });
  for (const Values& values : found) CHECK(at::allclose(values[0], -expected.to(at::kFloat)));
}

TEST_CASE("Named operations of C++ ranks are compared before they move", "[horovod]") {
  for (const Engine engine : kEngines) {
    const auto said = on_ranks<std::vector<std::string>>(2, engine, [](ThreadRank& rank) {
      Session session(rank.communicator);
      const double own = static_cast<double>(rank.where.rank) + 1;
      std::vector<std::string> errors;
      const auto value = [&](const at::Tensor& tensor, AllreduceOptions options) {
        return std::to_string(session.allreduce(tensor, options).sum().item<double>());
      };
      errors.push_back(value(at::full({2}, own), {}));
      errors.push_back(value(at::full({2}, own), {.name = "x", .op = Op::kSum}));
      errors.push_back(value(at::full({1}, own, at::kLong), {.op = Op::kAverage}));
      errors.push_back(value(at::full({2}, own, at::kHalf), {.op = Op::kMax}));
      errors.push_back(
          error_of([&] { session.allreduce(at::zeros({2 + rank.where.rank}), {.name = "y"}); }));
      const at::Tensor parameter = at::full({3}, own).set_requires_grad(true);
      const horovod::NamedTensors named(
          std::vector<std::pair<std::string, at::Tensor>>{{"w", parameter}});
      session.broadcast_parameters(named, 1);
      errors.push_back(std::to_string(parameter.sum().item<double>()));
      errors.push_back(error_of<c10::ValueError>([&] { session.broadcast_parameters(named, 2); }));
      session.allreduce(at::zeros({1}));  // nobody leaves while another still asks
      return errors;
    });
    for (const std::vector<std::string>& errors : said) {
      CHECK(errors[0] == std::to_string(3.0));
      CHECK(errors[1] == std::to_string(6.0));
      CHECK(errors[2] == std::to_string(1.0));
      CHECK(errors[3] == std::to_string(4.0));
      CHECK(errors[4].find("got another shape on each rank: rank 0 has [2], rank 1 has [3]") !=
            std::string::npos);
      CHECK(errors[5] == std::to_string(6.0));
      CHECK(errors[6].find("root rank 2") != std::string::npos);
    }
  }
}

TEST_CASE("Functions of a process need init()", "[horovod]") {
  CHECK_FALSE(horovod::is_initialized());
  CHECK(error_of<c10::ValueError>([] { horovod::rank(); }).find("before hvd::init()") !=
        std::string::npos);
}

}  // namespace trireme::distributed_optimizer_test
