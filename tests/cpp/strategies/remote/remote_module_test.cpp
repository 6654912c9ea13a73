#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include <catch_torch.h>
#include <latch>
#include <memory>
#include <strategies/remote/remote_ranks.h>
#include <string>
#include <vector>

namespace trireme::remote_module_test {

using test::Engine;
using test::error_of;
using test::run_endpoints;
using test::run_thread_ranks;
using test::ThreadRank;

namespace {

using Catch::Contains;
using remote::Endpoint;
using remote::RemoteModule;

// Returns a net whose weights are a formula, alike in every process.
torch::nn::Linear make_net(int64_t width) {
  torch::nn::Linear net(width, width);
  const torch::NoGradGuard no_grad;
  for (const auto& parameter : net->parameters())
    parameter.copy_(at::sin(at::arange(parameter.numel(), at::kFloat)).view_as(parameter));
  return net;
}

torch::nn::Sequential make_in_place(int64_t width) {
  const auto in_place = torch::nn::ReLUOptions().inplace(true);
  return torch::nn::Sequential(torch::nn::ReLU(in_place), make_net(width));
}

std::vector<Endpoint*> endpoints;

// Calls the net of another rank.
struct OuterImpl : torch::nn::Module {
  explicit OuterImpl(int64_t width)
      : inner(endpoints[1]->module("p0", "make_net", {.optimizer = SgdSpec{0.1, 0, 0}}, width)) {}
  at::Tensor forward(const at::Tensor& input) { return inner.forward(input).tanh(); }
  RemoteModule inner;
};
TORCH_MODULE(Outer);
std::shared_ptr<OuterImpl> last_outer;

void define_all() {
  static const bool once = [] {
    remote::define_module("make_net", &make_net);
    remote::define_module("make_in_place", &make_in_place);
    remote::define_module("make_sequential", [](int64_t width) {
      return torch::nn::Sequential(make_net(width), torch::nn::Tanh());
    });
    remote::define_module("shared_net", [](int64_t width) {
      static const torch::nn::Linear net = make_net(width);
      return net;
    });
    remote::define_module("make_outer", [](int64_t width) {
      const Outer outer(width);
      last_outer = outer.ptr();
      return outer;
    });
    return true;
  }();
  static_cast<void>(once);
}

at::Tensor input_of(int64_t rows, int64_t width) {
  return at::cos(at::arange(rows * width, at::kFloat)).view({rows, width}).requires_grad_();
}

}  // namespace

TEST_CASE("A remote module equals a local one bit for bit", "[remote]") {
  define_all();
  const Engine engine = GENERATE(Engine::kShm, Engine::kGloo);
  run_endpoints(
      2,
      [&](Endpoint& endpoint, int64_t rank) {
        if (rank != 0) return;
        torch::nn::Linear local = make_net(6);
        torch::optim::SGD optimizer(local->parameters(), 0.1);
        RemoteModule net =
            endpoint.module("p1", "make_net", {.optimizer = SgdSpec{0.1, 0, 0}}, int64_t{6});
        for (int64_t step = 0; step < 3; ++step) {
          const at::Tensor input = input_of(4, 6);
          const at::Tensor own = input.detach().clone().requires_grad_();
          const at::Tensor output = net.forward(input);
          const at::Tensor expected = local->forward(own);
          TORCH_CHECK(output.equal(expected) && output.requires_grad());
          (output * output).sum().backward();
          (expected * expected).sum().backward();
          TORCH_CHECK(input.grad().equal(own.grad()));
          net.step();
          net.zero_grad();
          optimizer.step();
          optimizer.zero_grad();
        }
        const auto state = net.state();
        TORCH_CHECK(state.size() == 2);
        for (const auto& [name, value] : state)
          TORCH_CHECK(value.equal(local->named_parameters()[name]), name);
        TORCH_CHECK(net.fetch("weight").equal(local->weight));
        TORCH_CHECK(net.parameters().size() == 2 && net.owner() == 1);
      },
      engine);
  SUCCEED();
}

TEST_CASE("A remote module works in place on its inputs, under the caller's autocast", "[remote]") {
  define_all();
  run_endpoints(2, [&](Endpoint& endpoint, int64_t rank) {
    if (rank != 0) return;
    for (const char* to : {"p0", "p1"}) {
      for (const bool casts : {false, true}) {
        RemoteModule net = endpoint.module(to, "make_in_place", {}, int64_t{6});
        torch::nn::Sequential local = make_in_place(6);
        const at::Tensor input = input_of(4, 6);
        const at::Tensor own = input.detach().clone().requires_grad_();
        at::autocast::set_autocast_enabled(at::kCPU, casts);
        const at::Tensor output = net.forward(input);
        const at::Tensor expected = local->forward(own.clone());
        at::autocast::set_autocast_enabled(at::kCPU, false);
        at::autocast::clear_cache();
        TORCH_CHECK(output.scalar_type() == (casts ? at::kBFloat16 : at::kFloat));
        TORCH_CHECK(output.equal(expected) && input._version() == 0);
        output.to(at::kFloat).square().sum().backward();
        expected.to(at::kFloat).square().sum().backward();
        TORCH_CHECK(input.grad().equal(own.grad()));
      }
    }
  });
  SUCCEED();
}

TEST_CASE("Callers of one module do not mix their gradients", "[remote]") {
  define_all();
  std::vector<at::Tensor> weights(3);
  std::latch stepped(2);
  run_endpoints(3, [&](Endpoint& endpoint, int64_t rank) {
    if (rank == 0) return;
    RemoteModule net =
        endpoint.module("p0", "shared_net", {.optimizer = SgdSpec{1, 0, 0}}, int64_t{3});
    // No step sees another's backward: the gradient is that of the own rank.
    net.forward(at::full({1, 3}, static_cast<double>(rank))).sum().backward();
    stepped.arrive_and_wait();
    if (rank == 1) net.step();
    stepped.wait();
    weights[rank] = net.fetch("weight");
  });
  const at::Tensor before = make_net(3)->weight;
  CHECK(weights[1].equal(before - 1));
}

TEST_CASE("A graph is used once, and knows when it is not possible", "[remote]") {
  define_all();
  std::vector<std::string> texts;
  run_endpoints(2, [&](Endpoint& endpoint, int64_t rank) {
    if (rank != 0) return;
    RemoteModule net = endpoint.module("p1", "make_sequential", {}, int64_t{3});
    const at::Tensor input = input_of(2, 3);
    const at::Tensor output = net.forward(input).sum();
    output.backward({}, /*retain_graph=*/true);
    texts = {error_of([&] { output.backward(); }), error_of([&] {
               torch::autograd::grad({net.forward(input).sum()}, {input}, {}, true, true);
             }),
             error_of([&] { net.step(); })};
    const at::NoGradGuard no_grad;
    TORCH_CHECK(!net.forward(input).requires_grad());
  });
  CHECK_THAT(texts[0], Contains("second time"));
  CHECK_THAT(texts[1], Contains("create_graph"));
  CHECK_THAT(texts[2], Contains("optimizer"));
}

TEST_CASE("A step of one caller leaves the graph of another as it was", "[remote]") {
  define_all();
  run_endpoints(2, [&](Endpoint& endpoint, int64_t rank) {
    if (rank != 0) return;
    RemoteModule module =
        endpoint.module("p1", "shared_net", {.optimizer = SgdSpec{1, 0, 0}}, int64_t{3});
    RemoteModule other = endpoint.module("p1", "shared_net", {}, int64_t{3});
    const at::Tensor weight = module.fetch("weight");
    const at::Tensor input = input_of(2, 3);
    const at::Tensor output = other.forward(input);
    module.forward(input).sum().backward();
    module.step();
    TORCH_CHECK(!module.fetch("weight").equal(weight));
    input.mutable_grad() = at::Tensor();
    output.sum().backward();
    TORCH_CHECK(input.grad().equal(at::ones({2, 3}).mm(weight)));
  });
  SUCCEED();
}

TEST_CASE("A module whose forward calls another process has its gradients", "[remote]") {
  define_all();
  std::latch ready(2);
  endpoints.assign(2, nullptr);
  run_endpoints(2, [&](Endpoint& endpoint, int64_t rank) {
    endpoints[rank] = &endpoint;
    ready.arrive_and_wait();
    if (rank != 0) return;
    RemoteModule outer = endpoint.module("p1", "make_outer", {}, int64_t{3});
    const at::Tensor input = input_of(2, 3);
    const at::Tensor own = input.detach().clone().requires_grad_();
    torch::nn::Linear local = make_net(3);
    local->forward(own).tanh().sum().backward();
    const at::Tensor output = outer.forward(input);
    output.sum().backward();
    TORCH_CHECK(input.grad().equal(own.grad()));
    // No input needs a gradient here; the inner parameters get theirs.
    outer.forward(input.detach()).sum().backward();
    last_outer->inner.step();
    TORCH_CHECK(
        last_outer->inner.fetch("weight").allclose(local->weight - 0.2 * local->weight.grad()));
    last_outer.reset();
  });
  SUCCEED();
}

}  // namespace trireme::remote_module_test
