// A DistributedDataParallel inside another one: the outer one averages alone, whatever the groups
// of those inside. tests/python/ddp/test_nesting.py has more.

#include <trireme/strategies/ddp/distributed_data_parallel.h>

#include <torch/nn.h>
#include <torch/optim.h>

#include <catch_torch.h>
#include <chrono>
#include <functional>
#include <memory>
#include <strategies/values.h>
#include <thread_ranks.h>
#include <utility>
#include <vector>

namespace trireme::ddp_nesting_test {

using test::count_unlike;
using test::Engine;
using test::run_thread_ranks;
using test::ThreadRank;
using test::Values;
using torch::nn::Linear;

namespace {

constexpr int64_t kSteps = 4;
constexpr int64_t kRows = 12;

// Two layers that may be wrapped.
template <typename Layer>
struct LayersImpl : torch::nn::Module {
  LayersImpl(Layer given_first, Layer given_last)
      : first(register_module("first", std::move(given_first))),
        last(register_module("last", std::move(given_last))) {}
  at::Tensor forward(const at::Tensor& x) {
    return last->forward(torch::tanh(first->forward(x))).square().mean();
  }
  Layer first, last;
};

template <typename Layer>
using Layers = std::shared_ptr<LayersImpl<Layer>>;
using Ddp1 = DistributedDataParallel<Linear>;
using Ddp2 = DistributedDataParallel<Ddp1>;

at::Tensor rows_of(int64_t step, RankOf where) {
  const at::Tensor whole =
      at::sin(at::arange(kRows * 6, at::kDouble).view({kRows, 6}) * static_cast<double>(step + 1));
  const int64_t share = kRows / where.world;
  return whole.to(at::kFloat).narrow(0, where.rank * share, share);
}

// Values that need no seed, which all ranks of a process would share.
template <typename Layer>
Layers<Layer> layers(const std::function<Layer(Linear)>& wrap) {
  double shift = 0;
  const auto make = [&](int64_t in, int64_t out) {
    Linear layer(in, out);
    const at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : layer->parameters())
      parameter.copy_(
          at::sin(at::arange(parameter.numel(), at::kDouble) + shift++).view(parameter.sizes()));
    return layer;
  };
  Layer first = wrap(make(6, 5));
  Layer last = wrap(make(5, 3));
  return std::make_shared<LayersImpl<Layer>>(std::move(first), std::move(last));
}

// `forward` leads to the loss of a rank's rows.
Values train(const std::vector<at::Tensor>& parameters, RankOf where,
             const std::function<at::Tensor(const at::Tensor&)>& forward) {
  torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
  Values seen;
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    forward(rows_of(step, where)).backward();
    for (const at::Tensor& parameter : parameters) seen.push_back(parameter.grad().clone());
    optimizer.step();
  }
  for (const at::Tensor& parameter : parameters) seen.push_back(parameter.detach().clone());
  return seen;
}

Values train_alone() {
  const Layers<Linear> net = layers<Linear>([](Linear layer) { return layer; });
  return train(net->parameters(), {0, 1}, [&](const at::Tensor& x) { return net->forward(x); });
}

template <typename Layer>
Values train_nested(ThreadRank& rank, const std::function<Layer(Linear)>& wrap) {
  DistributedDataParallel<Layers<Layer>> ddp(layers<Layer>(wrap), rank.communicator);
  return train(ddp->parameters(), rank.where, [&](const at::Tensor& x) { return ddp->forward(x); });
}

// What two ranks have to say, by rank.
std::vector<Values> on_ranks(Engine engine, const std::function<Values(ThreadRank&)>& rank_main) {
  std::vector<Values> results(2);
  run_thread_ranks(
      2, [&](ThreadRank& rank) { results[static_cast<size_t>(rank.where.rank)] = rank_main(rank); },
      std::chrono::seconds(30), engine);
  return results;
}

}  // namespace

TEST_CASE("ddp in ddp: ranks train as one process does on the whole batch") {
  const Values expected = train_alone();
  for (const Engine engine : {Engine::kGloo, Engine::kShm}) {
    CAPTURE(engine == Engine::kShm);
    for (const Values& found : on_ranks(engine, [](ThreadRank& rank) {
           return train_nested<Ddp1>(
               rank, [&](Linear layer) { return Ddp1(std::move(layer), rank.communicator); });
         }))
      CHECK(count_unlike(found, expected) == 0);
    for (const Values& found : on_ranks(engine, [](ThreadRank& rank) {
           return train_nested<Ddp2>(rank, [&](Linear layer) {
             return Ddp2(Ddp1(std::move(layer), rank.communicator), rank.communicator);
           });
         }))
      CHECK(count_unlike(found, expected) == 0);
  }
}

TEST_CASE("ddp in ddp: a forward of the inner one by itself counts as one of the outer one's") {
  // Twice under no_sync, then once more: of the inner layer alone, and of all.
  const auto run_backwards = [](auto& net, RankOf where, const auto& no_sync, const auto& all) {
    const at::Tensor x = rows_of(0, where);
    net.first->forward(x).sum().backward();
    all(x).backward();
    {
      [[maybe_unused]] const auto guard = no_sync();
      net.first->forward(x).sum().backward();
      all(x).backward();
    }
    (net.first->forward(x).sum() + all(x)).backward();
  };
  const Layers<Linear> alone = layers<Linear>([](Linear layer) { return layer; });
  for (const int64_t rank : {0, 1}) {
    const RankOf where{rank, 2};
    run_backwards(
        *alone, where, [] { return 0; }, [&](const at::Tensor& x) { return alone->forward(x); });
  }
  Values expected;
  for (const at::Tensor& parameter : alone->parameters()) expected.push_back(parameter.grad() / 2);
  for (const Engine engine : {Engine::kGloo, Engine::kShm}) {
    CAPTURE(engine == Engine::kShm);
    for (const Values& found : on_ranks(engine, [&](ThreadRank& rank) {
           const auto net = layers<Ddp1>(
               [&](Linear layer) { return Ddp1(std::move(layer), rank.communicator); });
           DistributedDataParallel<Layers<Ddp1>> ddp(net, rank.communicator);
           struct Guards {
             NoSync outer, inner;
           };
           run_backwards(
               *net, rank.where, [&] { return Guards{ddp->no_sync(), net->first->no_sync()}; },
               [&](const at::Tensor& x) { return ddp->forward(x); });
           Values grads;
           for (const at::Tensor& parameter : ddp->parameters())
             grads.push_back(parameter.grad().clone());
           return grads;
         }))
      CHECK(count_unlike(found, expected) == 0);
  }
}

TEST_CASE("ddp in ddp: the inner one averages by itself once the outer one is gone") {
  const at::Tensor all_rows = at::cat({rows_of(0, {0, 2}), rows_of(0, {1, 2})});
  const Layers<Linear> alone = layers<Linear>([](Linear layer) { return layer; });
  alone->first->forward(all_rows).sum().backward();
  const Values expected{alone->first->weight.grad() / 2};
  for (const Engine engine : {Engine::kGloo, Engine::kShm}) {
    for (const Values& found : on_ranks(engine, [](ThreadRank& rank) {
           const auto net = layers<Ddp1>(
               [&](Linear layer) { return Ddp1(std::move(layer), rank.communicator); });
           {
             DistributedDataParallel<Layers<Ddp1>> ddp(net, rank.communicator);
             ddp->forward(rows_of(0, rank.where)).backward();
           }
           for (const at::Tensor& parameter : net->parameters()) parameter.mutable_grad().reset();
           net->first->forward(rows_of(0, rank.where)).sum().backward();
           return Values{net->first->module()->weight.grad().clone()};
         }))
      CHECK(count_unlike(found, expected) == 0);
  }
}

}  // namespace trireme::ddp_nesting_test
