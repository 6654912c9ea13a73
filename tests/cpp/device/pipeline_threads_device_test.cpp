// Pipelines in one process whose threads are on devices of their own.

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

namespace trireme::pipeline_threads_device_test {

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

TEST_CASE("threads on devices have the gradients of plain accumulation, under every schedule") {
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

TEST_CASE("layers stay where they are without devices, two threads on one and back") {
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

// Has a part of the loss.
struct PartlyImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    pipeline_loss(x.square().mean(), 0.5);
    return at::tanh(x);
  }
};
TORCH_MODULE(Partly);

// Has parts of the loss on two devices.
torch::nn::Sequential partly(bool on_cpu) {
  const torch::nn::Sequential plain = on_cpu ? net_of(kLayers) : placed({0, 0, 1, 1});
  torch::nn::Sequential net;
  for (size_t i = 0; i < kLayers; ++i) {
    net->push_back(std::dynamic_pointer_cast<torch::nn::LinearImpl>(plain->ptr(2 * i)));
    net->push_back(Partly());
  }
  return net;
}

TEST_CASE("parts of the loss of a forward over devices have gradients on their devices") {
  torch::nn::Sequential whole = partly(/*on_cpu=*/true);
  at::Tensor expected = at::zeros({});
  for (const at::Tensor& part : batch().chunk(kChunks)) {
    std::vector<StageLoss> losses;
    const LossScope scope(losses);
    at::Tensor loss = mean_square(whole->forward(part), part);
    for (const StageLoss& term : losses) loss = loss + term.value * term.weight;
    loss.backward();
    expected = expected + loss.detach() / double(kChunks);
  }
  const c10::impl::VirtualGuardImpl sim(kSim);
  const auto fresh = [&] {
    return std::vector<c10::Stream>{sim.getStreamFromGlobalPool(sim_device(0)),
                                    sim.getStreamFromGlobalPool(sim_device(1))};
  };
  Pipeline<> pipe(partly(/*on_cpu=*/false), on_devices({sim_device(0), sim_device(1)}));
  for (int step = 0; step < 4; ++step) {
    pipe->zero_grad();
    std::vector<StageLoss> losses;
    at::Tensor output;
    if (step % 2 == 0) {
      const LossScope scope(losses);
      output = pipe->forward(batch());
    } else {  // on other streams than the loss
      const std::vector<c10::Stream> streams = fresh();
      const c10::MultiStreamGuard guard(streams);
      const LossScope scope(losses);
      output = pipe->forward(batch());
      for (const c10::Stream& stream : streams) stream.synchronize();
    }
    at::Tensor loss = mean_square(output, batch().to(sim_device(1)));
    for (const StageLoss& term : losses) loss = loss + (term.value * term.weight).to(sim_device(1));
    CHECK(at::allclose(loss.cpu(), expected));
    loss.backward();
    check_gradients(*pipe, *whole);
  }
}

struct DetachesImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x.detach(); }
};
TORCH_MODULE(Detaches);

TEST_CASE("a thread waits for the gradient of a part of the loss that comes on another stream") {
  const torch::nn::Sequential plain = placed({0, 1});
  const auto first = std::dynamic_pointer_cast<torch::nn::LinearImpl>(plain->ptr(0));
  const auto last = std::dynamic_pointer_cast<torch::nn::LinearImpl>(plain->ptr(2));
  // Nothing but the part has a gradient for the first thread.
  Pipeline<> pipe(torch::nn::Sequential(first, Partly(), Detaches(), last),
                  PipelineOptions{.ranks = false,
                                  .devices = {sim_device(0), sim_device(1)},
                                  .chunks = 1,
                                  .balance = {3, 1}});
  const c10::impl::VirtualGuardImpl sim(kSim);
  const at::Tensor weight = first->weight.detach().cpu();
  const at::Tensor bias = first->bias.detach().cpu();
  const at::Tensor y = batch().mm(weight.t()) + bias;
  const at::Tensor expected = y.t().mm(batch()) * (2.0 / double(y.numel()));
  for (int step = 0; step < 10; ++step) {
    pipe->zero_grad();
    std::vector<StageLoss> losses;
    at::Tensor output;
    {
      const std::vector<c10::Stream> streams{sim.getStreamFromGlobalPool(sim_device(0)),
                                             sim.getStreamFromGlobalPool(sim_device(1))};
      const c10::MultiStreamGuard guard(streams);
      const LossScope scope(losses);
      output = pipe->forward(batch());
      for (const c10::Stream& stream : streams) stream.synchronize();
    }
    // The gradient of the part is written last, and late.
    ((losses[0].value * 4.0).to(sim_device(1)) + output.sum() * 0.0).backward();
    CHECK(at::allclose(first->weight.grad().cpu(), expected * 4.0, 1e-4, 1e-6));
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

}  // namespace trireme::pipeline_threads_device_test
