// The functions of torch::nn::parallel, on CPU: one graph for all.

#include <trireme/strategies/data_parallel/parallel_functions.h>

#include <torch/autograd.h>

#include <catch_torch.h>
#include <set>
#include <strategies/data_parallel/replicated_nets.h>
#include <thread>

namespace trireme::parallel_functions_test {

using namespace trireme::test;
using Catch::Contains;

namespace {

std::vector<c10::Device> cpus(size_t count) {
  return std::vector<c10::Device>(count, c10::Device(c10::kCPU));
}

at::Tensor smooth(int64_t rows) {
  return at::sin(at::arange(rows * 4, at::kDouble)).view({rows, 4}).to(at::kFloat);
}

struct WithBuffersImpl : torch::nn::Cloneable<WithBuffersImpl> {
  WithBuffersImpl() { reset(); }
  void reset() override {
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
    layers = register_module("layers", torch::nn::Sequential(torch::nn::Linear(4, 4)));
  }
  at::Tensor forward(const at::Tensor& x) { return layers->forward(norm(x)); }
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Sequential layers{nullptr};
};
TORCH_MODULE(WithBuffers);

}  // namespace

TEST_CASE("scatter cuts as torch.chunk, and gather puts together") {
  for (const int64_t dim : {0, 1, -1})
    for (const size_t count : {1, 2, 3, 5}) {
      CAPTURE(dim, count);
      const at::Tensor x = smooth(7).requires_grad_(true);
      const Values parts = scatter(x, cpus(count), dim);
      CHECK(count_unlike(parts, x.chunk(static_cast<int64_t>(count), dim), 0) == 0);
      const at::Tensor whole = trireme::gather(parts, c10::kCPU, dim);
      CHECK(at::equal(whole, x));
      whole.square().sum().backward();
      CHECK(at::equal(x.grad(), x.detach() * 2));
    }
}

TEST_CASE("0-dim tensors go to all and come back as a vector") {
  const at::Tensor x = at::full({}, 3.0).requires_grad_(true);
  const Values parts = scatter(x, cpus(3));
  REQUIRE(parts.size() == 3);
  const at::Tensor whole = trireme::gather(parts, c10::kCPU);
  CHECK(at::equal(whole, at::full({3}, 3.0)));
  whole.sum().backward();
  CHECK(x.grad().item<double>() == 3);
}

TEST_CASE("scatter and gather refuse what does not fit") {
  CHECK_THROWS_WITH(scatter(smooth(4), {}), Contains("[data_parallel] got no devices"));
  CHECK_THROWS_WITH(scatter(smooth(4), cpus(2), 2),
                    Contains("got dim 2 for a tensor of 2 dimensions, expected -2 to 1"));
  CHECK_THROWS_WITH(trireme::gather({}, c10::kCPU), Contains("got no tensors"));
  CHECK_THROWS_WITH(trireme::gather({smooth(2), smooth(2).t()}, c10::kCPU),
                    Contains("got shape [4, 2] beside [2, 4]"));
  CHECK_THROWS_WITH(trireme::gather({smooth(2), smooth(2).to(at::kDouble)}, c10::kCPU),
                    Contains("got Double beside Float"));
  CHECK_THROWS_WITH(trireme::gather({smooth(2), smooth(2)}, c10::kCPU, -3), Contains("got dim -3"));
}

TEST_CASE("replicas share the parameters, and gradients arrive summed in the module's own") {
  auto net = seeded<Layers>();
  auto replicas = replicate(net, cpus(2));
  REQUIRE(replicas.size() == 2);
  CHECK(replicas[1]->embed->weight.data_ptr() == net->embed->weight.data_ptr());
  CHECK_FALSE(replicas[1]->embed->weight.is_leaf());
  for (auto& replica : replicas) replica->forward(characters(0, 4)).sum().backward();
  auto alone = seeded<Layers>();
  (alone->forward(characters(0, 4)).sum() * 2).backward();
  CHECK(count_unlike(gradients_of(*net), gradients_of(*alone), 1e-5, 1e-5) == 0);
}

TEST_CASE("replicas of a frozen parameter, and without gradients recorded") {
  WholeNumbers net;
  net->first.set_requires_grad(false);
  const auto replicas = replicate(net, cpus(2));
  CHECK_FALSE(replicas[1]->first.requires_grad());
  CHECK(replicas[1]->second.requires_grad());
  const at::NoGradGuard no_grad;
  CHECK_FALSE(replicate(net, cpus(2))[1]->second.requires_grad());
}

TEST_CASE("replica 0 writes the buffers of the module, the others copies") {
  WithBuffers net;
  net->norm->eval();
  auto replicas = replicate(net, cpus(2));
  CHECK_FALSE(replicas[0]->norm->is_training());
  CHECK(replicas[0]->layers[0]->is_training());
  replicas[0]->norm->running_mean.fill_(3);
  replicas[1]->norm->running_mean.fill_(5);
  CHECK(at::equal(net->norm->running_mean, at::full({4}, 3.0)));
}

TEST_CASE("a sparse gradient goes through replicas") {
  torch::nn::Embedding net(torch::nn::EmbeddingOptions(10, 3).sparse(true));
  auto replicas = replicate(net, cpus(2));
  for (auto& replica : replicas) replica->forward(at::arange(4, at::kLong)).sum().backward();
  CHECK(net->weight.grad().is_sparse());
  CHECK(net->weight.grad().to_dense().sum().item<double>() == 24);
}

TEST_CASE("parallel_apply calls each module in a thread of its own") {
  struct WhereImpl : torch::nn::Module {
    at::Tensor forward(const at::Tensor& x) {
      where = std::this_thread::get_id();
      records = at::GradMode::is_enabled();
      return x + 1;
    }
    std::thread::id where;
    bool records = true;
  };
  const std::vector<std::shared_ptr<WhereImpl>> modules{
      std::make_shared<WhereImpl>(), std::make_shared<WhereImpl>(), std::make_shared<WhereImpl>()};
  const at::NoGradGuard no_grad;
  const Values outputs = parallel_apply(modules, {smooth(1), smooth(2), smooth(3)});
  std::set<std::thread::id> threads{std::this_thread::get_id()};
  for (size_t i = 0; i < 3; ++i) {
    CHECK(at::equal(outputs[i], smooth(static_cast<int64_t>(i) + 1) + 1));
    CHECK_FALSE(modules[i]->records);
    threads.insert(modules[i]->where);
  }
  CHECK(threads.size() == 4);
  CHECK_THROWS_WITH(parallel_apply(modules, {smooth(1)}),
                    Contains("[data_parallel] got 1 inputs for 3 modules"));
  CHECK_THROWS_WITH(parallel_apply(modules, {smooth(1), smooth(1), smooth(1)}, cpus(2)),
                    Contains("got 2 devices for 3 modules"));
}

TEST_CASE("parallel_apply names the module that has failed") {
  std::vector<torch::nn::Linear> modules{torch::nn::Linear(4, 2), torch::nn::Linear(3, 2)};
  CHECK_THROWS_WITH(parallel_apply(modules, {smooth(2), smooth(2)}),
                    Contains("[data_parallel] in module 1 of 2 (cpu)"));
}

TEST_CASE("data_parallel equals one process, second derivatives too") {
  for (const size_t count : {1, 2, 3}) {
    CAPTURE(count);
    auto net = seeded<Layers>();
    auto alone = seeded<Layers>();
    const at::Tensor output = data_parallel(net, characters(2, 7), cpus(count));
    const at::Tensor expected = alone->forward(characters(2, 7));
    CHECK(at::allclose(output, expected, 1e-5, 1e-6));
    const auto twice = [](const at::Tensor& result, const Values& parameters) {
      const Values first = torch::autograd::grad({result.square().sum()}, parameters, {},
                                                 /*retain_graph=*/true, /*create_graph=*/true);
      at::Tensor norm = at::zeros({});
      for (const at::Tensor& gradient : first) norm = norm + gradient.square().sum();
      norm.backward();
    };
    twice(output, net->parameters());
    twice(expected, alone->parameters());
    CHECK(count_unlike(gradients_of(*net), gradients_of(*alone), 1e-4, 1e-4) == 0);
  }
}

TEST_CASE("data_parallel has torch's defaults and takes fewer rows than devices") {
  WholeNumbers net;
  const at::Tensor x = whole_rows(5);
  CHECK(at::equal(data_parallel(net, x), net->forward(x)));
  CHECK(at::equal(data_parallel(net, whole_rows(2), cpus(4), c10::Device(c10::kCPU), 0),
                  net->forward(whole_rows(2))));
  CHECK_THROWS_WITH(data_parallel(net, x, cpus(0)), Contains("got no devices"));
}

}  // namespace trireme::parallel_functions_test
