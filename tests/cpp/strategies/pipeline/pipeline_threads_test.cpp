#include <trireme/strategies/pipeline/threads/pipeline_threads.h>

#include <trireme/activation/kept_tensor.h>
#include <trireme/activation/saved_tensor_hooks.h>
#include <trireme/comm/threads/thread_group.h>
#include <trireme/module/sends_gradients.h>
#include <trireme/strategies/pipeline/pipeline.h>
#include <trireme/strategies/pipeline/schedule_forms.h>

#include <torch/nn.h>

#include <algorithm>
#include <atomic>
#include <catch_torch.h>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "strategies/pipeline/losses.h"
#include "strategies/pipeline/tables.h"

namespace trireme::pipeline_threads_test {

using Catch::Matchers::Contains;
using test::make_form;
using Tensors = std::vector<at::Tensor>;

constexpr int64_t kChunks = 4;

// Is a stage that calls a function, with parameters.
class Called final : public StageFunction {
 public:
  using Function = std::function<at::Tensor(const at::Tensor&)>;
  explicit Called(Function function) : function_(std::move(function)) {}

  PipelineValue forward(int64_t /*micro_batch*/, PipelineValue input) override {
    return {{function_(input.tensors.front())}};
  }
  at::Tensor loss(int64_t /*micro_batch*/, const PipelineValue& output) override {
    return output.tensors.front().square().mean();
  }

 private:
  Function function_;
};

struct StageOf {
  Called::Function function;
  Tensors parameters;
};

// Holds a pipeline of these stages on as many threads.
struct Threads {
  explicit Threads(const std::vector<StageOf>& stages, const std::string& form = "1f1b")
      : pool(std::make_shared<WorkerPool>(std::vector<c10::Device>(stages.size(), at::kCPU),
                                          std::vector<int>(stages.size(), 1))) {
    pool->start();
    PipelineThreadsRequest request{
        .schedule = make_form(form, static_cast<int64_t>(stages.size()), kChunks)};
    for (size_t i = 0; i < stages.size(); ++i) {
      NamedParameters named;
      for (size_t k = 0; k < stages[i].parameters.size(); ++k) {
        named.names.push_back("parameter " + std::to_string(k));
        named.tensors.push_back(stages[i].parameters[k]);
        named.sparse_gradient.push_back(false);
      }
      request.stages.push_back(
          {static_cast<int64_t>(i), "", std::make_shared<Called>(stages[i].function), named});
    }
    runner = std::make_unique<PipelineThreads>(std::move(request), pool);
  }

  std::shared_ptr<WorkerPool> pool;
  std::unique_ptr<PipelineThreads> runner;
};

std::vector<PipelineValue> inputs() {
  std::vector<PipelineValue> all;
  for (int64_t i = 0; i < kChunks; ++i)
    all.push_back({{at::arange(6, at::kFloat).view({2, 3}) * (0.1 * double(i + 1))}});
  return all;
}

at::Tensor weight_of(int64_t seed) {
  return at::sin(at::arange(9, at::kFloat) * double(seed)).view({3, 3}).set_requires_grad(true);
}

TEST_CASE("what stages on several threads share has the gradients of all of them") {
  const at::Tensor shared = weight_of(1);
  const at::Tensor own = weight_of(2);
  const auto by = [](const at::Tensor& weight) {
    return [weight](const at::Tensor& x) { return at::tanh(x.mm(weight)); };
  };
  Threads threads({{by(shared), {shared}}, {by(own), {own}}, {by(shared), {shared}}});
  for (int64_t step = 0; step < 3; ++step) {
    // Frozen in the second step, and so without a gradient.
    shared.set_requires_grad(step != 1);
    shared.mutable_grad().reset();
    own.mutable_grad().reset();
    at::Tensor loss = threads.runner->step(inputs(), {});
    const at::Tensor got = shared.grad();
    const at::Tensor got_own = own.grad();
    shared.mutable_grad().reset();
    own.mutable_grad().reset();
    Tensors losses;
    for (const PipelineValue& input : inputs()) {
      const at::Tensor y = by(shared)(by(own)(by(shared)(input.tensors.front())));
      losses.push_back(y.square().mean());
      losses.back().backward();
    }
    CHECK(loss.equal(test::mean_of(losses)));
    CHECK(got_own.equal(own.grad() / kChunks));
    REQUIRE(got.defined() == (step != 1));
    if (got.defined()) CHECK(at::allclose(got, shared.grad() / kChunks));
  }
}

struct Refusal : std::runtime_error {
  using std::runtime_error::runtime_error;
};

TEST_CASE("an exception of a stage comes out as it is, and the next step works") {
  const at::Tensor weight = weight_of(3);
  for (const char* form : {"gpipe", "1f1b", "zb-h1"}) {
    int64_t calls = 0;
    const auto fails = [&calls](const at::Tensor& x) {
      if (++calls == 3) throw Refusal("no luck");
      return x * 2;
    };
    const auto by_weight = [&](const at::Tensor& x) { return x.mm(weight); };
    Threads threads({{by_weight, {weight}}, {fails, {}}, {by_weight, {weight}}}, form);
    weight.mutable_grad().reset();
    CHECK_THROWS_AS(threads.runner->step(inputs(), {}), Refusal);
    CHECK(threads.runner->raised_in() == "the forward of micro-batch 2 of stage 1");
    CHECK(!weight.grad().defined());
    CHECK(threads.runner->step(inputs(), {}).item<double>() > 0);
    CHECK(threads.runner->raised_in().empty());
  }
}

TEST_CASE("random layers draw the same numbers in every run") {
  const at::Tensor weight = weight_of(4);
  const auto drops = [&](const at::Tensor& x) { return at::dropout(x.mm(weight), 0.5, true); };
  const auto last = [](const at::Tensor& x) { return at::dropout(x, 0.5, true); };
  Threads threads({{drops, {weight}}, {last, {}}});
  Tensors losses;
  for (int64_t run = 0; run < 5; ++run) {
    torch::manual_seed(5);
    losses.push_back(threads.runner->step(inputs(), {}));
  }
  for (const at::Tensor& loss : losses) CHECK(loss.equal(losses.front()));
}

TEST_CASE("evaluation gives the outputs of all micro-batches") {
  const at::Tensor weight = weight_of(5);
  const auto by = [&](const at::Tensor& x) { return x.mm(weight); };
  Threads threads({{by, {weight}}, {by, {weight}}});
  const auto outputs = threads.runner->eval_step(inputs(), /*has_loss=*/false).outputs;
  REQUIRE(outputs.size() == kChunks);
  for (int64_t i = 0; i < kChunks; ++i) {
    const at::Tensor x = inputs()[static_cast<size_t>(i)].tensors.front();
    CHECK(outputs[static_cast<size_t>(i)].tensors.front().equal(x.mm(weight).mm(weight)));
    CHECK(!outputs[static_cast<size_t>(i)].tensors.front().requires_grad());
  }
}

torch::nn::Sequential net_of(int64_t layers) {
  torch::manual_seed(6);
  torch::nn::Sequential net;
  for (int64_t i = 0; i < layers; ++i) {
    net->push_back(torch::nn::Linear(3, 3));
    net->push_back(torch::nn::Tanh());
  }
  return net;
}

at::Tensor mean_square(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).square().mean();
}

// Adds the step's input, which it asks for.
struct AddsInputImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x + batch_input(); }
};
TORCH_MODULE(AddsInput);

// Multiplies with a weight that it does not have.
struct UsesImpl : torch::nn::Module {
  explicit UsesImpl(at::Tensor weight) : weight_(std::move(weight)) {}
  at::Tensor forward(const at::Tensor& x) { return x.mm(weight_); }

 private:
  at::Tensor weight_;
};
TORCH_MODULE(Uses);

// Says that its gradients go elsewhere, and so it is the loss that is divided.
struct SendsImpl : UsesImpl, SendsGradients {
  using UsesImpl::UsesImpl;
};
TORCH_MODULE(Sends);

TEST_CASE("Pipeline in one process needs no Context, and equals plain accumulation") {
  for (const char* checkpoint : {"never", "always"}) {
    torch::nn::Sequential whole = net_of(4);
    Pipeline<> pipe(net_of(4), PipelineOptions{.ranks = false,
                                               .threads = 2,
                                               .chunks = 4,
                                               .schedule = "1f1b",
                                               .checkpoint = checkpoint});
    CHECK(pipe->schedule().ranks == 2);
    const at::Tensor x = at::sin(at::arange(24, at::kFloat)).view({8, 3});
    Tensors losses;
    for (const at::Tensor& part : x.chunk(4)) {
      losses.push_back(mean_square(whole->forward(part), part));
      losses.back().backward();
    }
    CHECK(pipe->step(x, x, mean_square).equal(test::mean_of(losses)));
    const Tensors own = pipe->parameters();
    const Tensors expected = whole->parameters();
    REQUIRE(own.size() == expected.size());
    for (size_t i = 0; i < own.size(); ++i) CHECK(own[i].grad().equal(expected[i].grad() / 4));
    CHECK(pipe->last_step().stages.size() == 2);
    CHECK(pipe->eval_step(x).equal(
        at::cat({whole->forward(x.slice(0, 0, 2)), whole->forward(x.slice(0, 2, 4)),
                 whole->forward(x.slice(0, 4, 6)), whole->forward(x.slice(0, 6, 8))})));
  }
}

TEST_CASE("a forward in one process has a graph, and a loss outside") {
  for (const char* checkpoint : {"never", "except_last", "always", "auto"}) {
    torch::nn::Sequential whole = net_of(4);
    Pipeline<> pipe(
        net_of(4),
        PipelineOptions{.ranks = false, .threads = 3, .chunks = 4, .checkpoint = checkpoint});
    for (const int64_t rows : {8, 3}) {
      const int64_t chunks = std::min<int64_t>(rows, 4);
      pipe->zero_grad();
      whole->zero_grad();
      at::Tensor x = at::sin(at::arange(rows * 3, at::kFloat)).view({rows, 3});
      at::Tensor own_x = x.clone().set_requires_grad(true);
      x.set_requires_grad(true);
      const at::Tensor output = pipe->forward(own_x);
      mean_square(output, own_x.detach()).backward();
      // Outputs get these gradients in the order of micro-batches, too.
      Tensors outputs;
      for (const at::Tensor& part : x.tensor_split(chunks)) outputs.push_back(whole->forward(part));
      const at::Tensor gradient = 2 * (at::cat(outputs) - x).detach() / double(rows * 3);
      const Tensors gradients = gradient.tensor_split(chunks);
      for (size_t i = 0; i < outputs.size(); ++i) outputs[i].backward(gradients[i]);
      CHECK(output.equal(at::cat(outputs)));
      CHECK(at::allclose(own_x.grad(), x.grad()));
      const Tensors own = pipe->parameters();
      const Tensors expected = whole->parameters();
      for (size_t i = 0; i < own.size(); ++i)
        CHECK(at::allclose(own[i].grad(), expected[i].grad()));
    }
  }
}

// Has a part of the loss.
struct PartlyImpl : torch::nn::Module {
  explicit PartlyImpl(double part_weight) : weight(part_weight) {
    register_module("linear", linear);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = linear(x);
    pipeline_loss(y.square().mean(), weight);
    return y.tanh();
  }
  torch::nn::Linear linear{3, 3};
  double weight;
};
TORCH_MODULE(Partly);

torch::nn::Sequential partly() {
  torch::manual_seed(8);
  return torch::nn::Sequential(Partly(0.5), torch::nn::Linear(3, 3), Partly(0.25));
}

at::Tensor sum_of(const std::vector<StageLoss>& losses) {
  at::Tensor sum = at::zeros({});
  for (const StageLoss& loss : losses) sum = sum + loss.value * loss.weight;
  return sum;
}

TEST_CASE("who calls a pipeline in one process collects parts of the loss") {
  const at::Tensor x = at::sin(at::arange(24, at::kFloat)).view({8, 3});
  for (const char* checkpoint : {"never", "always"}) {
    for (const bool scale : {true, false}) {
      CAPTURE(checkpoint, scale);
      torch::nn::Sequential whole = partly();
      at::Tensor expected = at::zeros({});
      for (const at::Tensor& part : x.chunk(kChunks)) {
        std::vector<StageLoss> losses;
        at::Tensor output;
        {
          const LossScope scope(losses);
          output = whole->forward(part);
        }
        const at::Tensor parts = sum_of(losses) / (scale ? kChunks : 1);
        (output.sum() + parts).backward();
        expected = expected + parts.detach();
      }
      Pipeline<> pipe(partly(), PipelineOptions{.ranks = false,
                                                .threads = 2,
                                                .chunks = kChunks,
                                                .scale_grads = scale,
                                                .checkpoint = checkpoint});
      std::vector<StageLoss> losses;
      at::Tensor output;
      {
        const LossScope scope(losses);
        output = pipe->forward(x);
      }
      REQUIRE(losses.size() == 2 * kChunks);
      CHECK(at::allclose(sum_of(losses), expected));
      (output.sum() + sum_of(losses)).backward();
      const Tensors own = pipe->parameters();
      const Tensors gradients = whole->parameters();
      for (size_t i = 0; i < own.size(); ++i)
        CHECK(at::allclose(own[i].grad(), gradients[i].grad()));
      CHECK_THROWS_WITH(pipe->forward(x), Contains("a part of the loss outside of a pipeline"));
      const at::NoGradGuard no_grad;
      CHECK(pipe->forward(x).size(0) == 8);
    }
  }
}

TEST_CASE("threads that call one pipeline get what is their own") {
  Pipeline<> pipe(
      torch::nn::Sequential(AddsInput(), torch::nn::Tanh(), AddsInput(), torch::nn::Tanh()),
      PipelineOptions{.ranks = false, .threads = 2, .chunks = 4});
  constexpr size_t kCallers = 3;
  std::vector<int64_t> wrong(kCallers, 0);
  std::vector<std::thread> callers;
  for (size_t caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([&, caller] {
      for (int64_t call = 0; call < 40; ++call) {
        at::Tensor x = at::full({8, 3}, double(caller) - 0.1 * double(call));
        const at::Tensor expected = ((2 * x).tanh() + x).tanh();
        if (call % 2 == 0) {
          wrong[caller] += pipe->eval_step(x).equal(expected) ? 0 : 1;
          continue;
        }
        x.set_requires_grad(true);
        const at::Tensor output = pipe->forward(x);
        output.sum().backward();
        wrong[caller] += output.equal(expected) && x.grad().defined() ? 0 : 1;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(wrong == std::vector<int64_t>(kCallers, 0));
}

TEST_CASE("a call during another one is refused over ranks, and within one thread") {
  CallTurn turn(ThreadGroup(1).communicator(0));
  turn.take(nullptr);
  CHECK_THROWS_WITH(turn.take(nullptr), Contains("got a call from within another one"));
  std::string heard;
  std::thread([&] {
    try {
      turn.take(nullptr);
    } catch (const c10::Error& error) {
      heard = error.what();
    }
  }).join();
  CHECK_THAT(heard, Contains("got a call during one of another thread"));
  turn.give_back();
  turn.take(nullptr);
  turn.give_back();
}

// Counts what it packs.
class CountingPacker final : public SavedTensorPacker {
 public:
  c10::intrusive_ptr<PackedSavedTensor> pack(const at::Tensor& tensor) override {
    ++packed;
    return c10::make_intrusive<KeptTensor>(tensor);
  }
  std::atomic<int64_t> packed = 0;
};

TEST_CASE("what packs saved tensors goes along to the threads") {
  Pipeline<> pipe(net_of(4), PipelineOptions{.ranks = false, .threads = 2, .chunks = 4});
  const at::Tensor x = at::sin(at::arange(24, at::kFloat)).view({8, 3});
  const auto packer = c10::make_intrusive<CountingPacker>();
  at::Tensor output;
  {
    const PackerGuard guard(packer);
    output = pipe->forward(x);
  }
  const int64_t packed = packer->packed;
  CHECK(packed >= 4 * 4);  // each layer saves something of each micro-batch
  output.sum().backward();
  pipe->forward(x).sum().backward();
  CHECK(packer->packed == packed);
}

TEST_CASE("a first layer may work in place") {
  for (const char* form : {"gpipe", "1f1b"}) {
    torch::nn::Sequential net(torch::nn::ReLU(torch::nn::ReLUOptions().inplace(true)),
                              torch::nn::Linear(3, 3), torch::nn::Tanh());
    Pipeline<> pipe(net,
                    PipelineOptions{.ranks = false, .threads = 2, .chunks = 4, .schedule = form});
    at::Tensor x = at::sin(at::arange(24, at::kFloat)).view({8, 3});
    const int64_t version = x._version();
    const at::Tensor y = at::cos(x);
    const at::Tensor expected = mean_square(net->forward(x.clone()), y).detach();
    CHECK(at::allclose(pipe->step(x, y, mean_square), expected));
    CHECK(x._version() > version);
    CHECK(at::allclose(x, at::relu(at::sin(at::arange(24, at::kFloat)).view({8, 3}))));
  }
}

TEST_CASE("gradients that come to no parameter of a layer are divided") {
  const at::Tensor weight = weight_of(5);
  const at::Tensor scale = at::full({}, 2.0).set_requires_grad(true);
  for (const bool sends : {false, true}) {
    torch::nn::Sequential net(torch::nn::Linear(3, 3), Sends(weight), torch::nn::Tanh());
    if (!sends)
      net = torch::nn::Sequential(torch::nn::Linear(3, 3), Uses(weight), torch::nn::Tanh());
    const PipelineLoss loss = [scale](const at::Tensor& output, const at::Tensor& target) {
      return mean_square(output * scale, target);
    };
    Pipeline<> pipe(net, PipelineOptions{.ranks = false, .threads = 2, .chunks = 4});
    const at::Tensor x = at::sin(at::arange(24, at::kFloat)).view({8, 3}).set_requires_grad(true);
    const at::Tensor y = at::cos(x).detach();
    loss(net->forward(x), y).backward();
    const auto take = [&] {
      Tensors found{weight.grad(), scale.grad(), x.grad()};
      for (const at::Tensor& tensor : {weight, scale, x}) tensor.mutable_grad().reset();
      for (const at::Tensor& parameter : net->parameters()) {
        found.push_back(parameter.grad());
        parameter.mutable_grad().reset();
      }
      return found;
    };
    const Tensors expected = take();
    pipe->step(x, y, loss);
    const Tensors found = take();
    REQUIRE(found.size() == expected.size());
    for (size_t i = 0; i < found.size(); ++i) CHECK(at::allclose(found[i], expected[i]));
  }
}

TEST_CASE("what a pipeline in one process refuses") {
  CHECK_THROWS_WITH(Pipeline<>(net_of(2), PipelineOptions{.ranks = false, .replicas = 2}),
                    Contains("got replicas=2 of a pipeline in one process"));
  CHECK_THROWS_WITH(Pipeline<>(net_of(1), PipelineOptions{.ranks = false, .threads = 3}),
                    Contains("2 layers and 3 stages") || Contains("fewer"));
  CHECK_THROWS_WITH(Pipeline<>(net_of(1), PipelineOptions{.ranks = false, .threads = -1}),
                    Contains("got threads=-1"));
}

}  // namespace trireme::pipeline_threads_test
