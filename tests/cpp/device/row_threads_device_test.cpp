// Pipelines in one process whose rows are on devices of their own.

#include <trireme/module/autograd_node.h>
#include <trireme/strategies/pipeline/pipeline.h>

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/nn.h>

#include <catch_torch.h>
#include <device/sim_device.h>
#include <string>
#include <vector>

namespace trireme::row_threads_device_test {

using namespace trireme::test;
using Catch::Matchers::Contains;
using Tensors = std::vector<at::Tensor>;

constexpr int64_t kLayers = 4;
constexpr int64_t kChunks = 4;
constexpr int64_t kWidth = 64;

torch::nn::Sequential net_of(int64_t linears) {
  torch::nn::Sequential net;
  for (int64_t i = 0; i < linears; ++i) {
    torch::nn::Linear linear(kWidth, kWidth);
    const torch::NoGradGuard no_grad;
    linear->weight.copy_(at::sin(at::arange(kWidth * kWidth, at::kFloat) + double(i))
                             .view({kWidth, kWidth})
                             .div(double(kWidth)));
    linear->bias.fill_(0.1 * double(i));
    net->push_back(linear);
    net->push_back(torch::nn::Tanh());
  }
  return net;
}

// Deals the layers out as the pipeline does; the device of layer `2 * i` is places[i].
torch::nn::Sequential placed(const std::vector<int64_t>& places) {
  torch::nn::Sequential net = net_of(static_cast<int64_t>(places.size()));
  for (size_t i = 0; i < places.size(); ++i) move_to(*net->ptr(2 * i), sim_device(places[i]));
  return net;
}

at::Tensor mean_square(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).square().mean();
}

at::Tensor batch() {
  return at::sin(at::arange(2 * kChunks * kWidth, at::kFloat)).view({2 * kChunks, kWidth});
}

// Accumulates the gradients of micro-batches on the CPU; returns the mean of their losses.
at::Tensor accumulate(torch::nn::Sequential& net) {
  Tensors losses;
  for (const at::Tensor& part : batch().chunk(kChunks)) {
    losses.push_back(mean_square(net->forward(part), part));
    losses.back().backward();
  }
  return at::stack(losses).detach().mean();
}

void check_gradients(torch::nn::Module& pipe, torch::nn::Module& whole) {
  const Tensors own = pipe.parameters();
  const Tensors expected = whole.parameters();
  REQUIRE(own.size() == expected.size());
  for (size_t i = 0; i < own.size(); ++i) {
    CHECK(own[i].grad().device() == own[i].device());
    CHECK(at::allclose(own[i].grad().cpu(), expected[i].grad() / double(kChunks)));
  }
}

PipelineOptions on_devices(std::vector<c10::Device> devices) {
  return {.ranks = false, .devices = std::move(devices), .chunks = kChunks};
}

TEST_CASE("rows on devices have the gradients of plain accumulation, under every schedule") {
  torch::nn::Sequential whole = net_of(kLayers);
  const at::Tensor loss = accumulate(whole);
  for (const char* schedule : {"gpipe", "1f1b", "zb-h1"}) {
    for (const char* checkpoint : {"never", "always"}) {
      PipelineOptions options = on_devices({sim_device(0), sim_device(1)});
      options.schedule = schedule;
      options.checkpoint = checkpoint;
      Pipeline<> pipe(placed({0, 0, 1, 1}), options);
      for (int step = 0; step < 3; ++step) {
        pipe->zero_grad();
        CHECK(at::allclose(pipe->step(batch(), batch(), mean_square).cpu(), loss));
        check_gradients(*pipe, *whole);
      }
      CHECK(at::allclose(pipe->eval_step(batch(), batch(), mean_square).cpu(), loss));
      CHECK(pipe->eval_step(batch()).device() == sim_device(1));
    }
  }
}

TEST_CASE("layers stay where they are without devices, two rows on one and back") {
  torch::nn::Sequential whole = net_of(kLayers);
  const at::Tensor loss = accumulate(whole);
  Pipeline<> pipe(placed({0, 1, 1, 0}),
                  PipelineOptions{.ranks = false, .threads = 4, .chunks = kChunks});
  const at::Tensor there = batch().to(sim_device(0));
  CHECK(at::allclose(pipe->step(there, there, mean_square).cpu(), loss));
  check_gradients(*pipe, *whole);
}

TEST_CASE("a forward over devices has a graph, on whatever streams are current") {
  torch::nn::Sequential whole = net_of(kLayers);
  accumulate(whole);
  const c10::impl::VirtualGuardImpl sim(kSim);
  const auto fresh = [&](int64_t device) {
    return sim.getStreamFromGlobalPool(sim_device(device));
  };
  for (const char* checkpoint : {"never", "always"}) {
    PipelineOptions options = on_devices({sim_device(0), sim_device(1)});
    options.checkpoint = checkpoint;
    Pipeline<> pipe(placed({0, 0, 1, 1}), options);
    for (const bool is_backward_elsewhere : {false, true}) {
      pipe->zero_grad();
      const std::vector<c10::Stream> streams{fresh(0), fresh(1)};
      at::Tensor loss;
      {
        const c10::MultiStreamGuard guard(streams);
        const at::Tensor output = pipe->forward(batch());
        CHECK(output.device() == sim_device(1));
        loss = mean_square(output, batch().to(sim_device(1)));
        if (!is_backward_elsewhere) loss.backward();
      }
      if (is_backward_elsewhere) {
        loss.backward();
        check_gradients(*pipe, *whole);
      } else {
        const c10::MultiStreamGuard guard(streams);
        check_gradients(*pipe, *whole);
      }
    }
  }
}

// Runs a pipeline and its backward in the backward of another graph.
class WithinBackward final : public torch::autograd::Node {
 public:
  explicit WithinBackward(Pipeline<>& pipe) : pipe_(pipe) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    const at::AutoGradMode with_graphs(true);
    pipe_->forward(batch()).sum().backward();
    return std::move(gradients);
  }

 private:
  Pipeline<>& pipe_;
};

TEST_CASE("a backward within another one on a device is refused, and leaves nothing behind") {
  torch::nn::Sequential whole = net_of(kLayers);
  accumulate(whole);
  Pipeline<> pipe(placed({0, 0, 1, 1}), on_devices({sim_device(0), sim_device(1)}));
  const at::Tensor leaf = at::ones({3}).to(sim_device(0)).set_requires_grad(true);
  at::Tensor output = leaf.detach();
  const auto node = make_node<WithinBackward>(pipe);
  node->set_next_edges({torch::autograd::impl::gradient_edge(leaf)});
  torch::autograd::set_history(output, node);
  CHECK_THROWS_WITH(output.sum().backward(), Contains("from within another backward"));
  pipe->zero_grad();
  pipe->step(batch(), batch(), mean_square);
  check_gradients(*pipe, *whole);
}

TEST_CASE("what a pipeline on devices refuses") {
  using Catch::Matchers::Contains;
  PipelineOptions options = on_devices({sim_device(0), sim_device(1)});
  options.threads = 3;
  CHECK_THROWS_WITH(Pipeline<>(placed({0, 1}), options), Contains("got threads=3 and 2 devices"));
  CHECK_THROWS_WITH(Pipeline<>(placed({0, 1}), PipelineOptions{.ranks = false, .threads = 1}),
                    Contains("got '2.weight' of stage 0 on sim:1, expected it on sim:0"));
}

}  // namespace trireme::row_threads_device_test
