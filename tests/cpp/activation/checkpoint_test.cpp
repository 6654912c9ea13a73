#include <trireme/activation/checkpoint.h>

#include <trireme/activation/checkpoint_sequential.h>

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "catch_torch.h"

namespace trireme {
namespace {

using torch::Tensor;
using torch::autograd::grad;

// A block with everything that a recomputation has to repeat, and a count of its calls.
struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    linear = register_module("linear", torch::nn::Linear(8, 8));
    dropout = register_module("dropout", torch::nn::Dropout(0.5));
  }
  Tensor forward(const Tensor& x) {
    ++calls;
    return x + dropout(torch::tanh(linear(x))).mul(2).relu_();
  }
  torch::nn::Linear linear{nullptr};
  torch::nn::Dropout dropout{nullptr};
  std::atomic<int> calls{0};
};
TORCH_MODULE(Block);

bool equal(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Tensor& x, const Tensor& y) { return torch::equal(x, y); });
}

// Trains a step from the same seed; returns the loss, all gradients and the next random number.
std::vector<Tensor> train(torch::nn::Module& module, Tensor x, const std::function<Tensor()>& run) {
  torch::manual_seed(7);
  module.zero_grad();
  x.mutable_grad() = Tensor();
  const Tensor loss = run().square().sum();
  loss.backward();
  std::vector<Tensor> found{loss.detach(), x.grad()};
  for (const Tensor& parameter : module.parameters()) {
    found.push_back(parameter.grad());
  }
  found.push_back(torch::rand({}));
  return found;
}

Tensor leaf() { return torch::randn({4, 8}).requires_grad_(); }

std::string checkpoint_error(const std::function<void()>& call) {
  return test::error_of<CheckpointError>(call);
}

TEST_CASE("nothing of a checkpoint outlives what its graph saves") {
  const auto held = std::make_shared<int>();
  const Tensor x = at::ones({3}).requires_grad_();
  const auto function = [](const std::shared_ptr<int>& held) {
    return [held](const Tensor& v) { return v.sin().exp(); };
  };
  const Tensor out = trireme::checkpoint(function(held), x).sum();
  CHECK(held.use_count() == 2);
  out.backward();
  CHECK(held.use_count() == 1);
  static_cast<void>(trireme::checkpoint(function(held), x));
  CHECK(held.use_count() == 1);
}

TEST_CASE("bits are those of a plain call, and blocks run once more") {
  torch::nn::Sequential net(Block{}, Block{}, Block{}, Block{}, Block{});
  const Tensor x = leaf();
  const auto plain = train(*net, x, [&] { return net->forward(x); });
  const auto calls = [&](int64_t i) { return net->ptr<BlockImpl>(i)->calls - 1; };

  SECTION("in segments") {
    CHECK(equal(train(*net, x, [&] { return checkpoint_sequential(net, 3, x); }), plain));
    CHECK(calls(0) == 2);
    CHECK(calls(4) == 1);  // torch, too, leaves the last segment alone
  }
  SECTION("by a plan") {
    const CheckpointPlan plan{{true, false, true, false, false}, 0, 0};
    CHECK(equal(train(*net, x, [&] { return checkpoint_sequential(net, plan, x); }), plain));
    CHECK(calls(0) == 2);
    CHECK(calls(1) == 1);
  }
  SECTION("nested: inner ones are recomputed for themselves and for the outer one") {
    const auto run = [&] {
      const auto inner = [&](const Tensor& value, int64_t i) {
        return checkpoint([&, i](const Tensor& v) { return net->ptr<BlockImpl>(i)->forward(v); },
                          value);
      };
      const auto outer = [inner](Tensor value) {
        for (int64_t i = 0; i < 5; ++i) {
          value = inner(value, i);
        }
        return value;
      };
      return checkpoint(outer, x);
    };
    CHECK(equal(train(*net, x, run), plain));
    CHECK(calls(0) == 3);
  }
  SECTION("without random numbers of the forward they differ") {
    CheckpointOptions options;
    options.preserve_rng_state = false;
    CHECK_FALSE(
        equal(train(*net, x, [&] { return checkpoint_sequential(net, 5, x, options); }), plain));
  }
}

TEST_CASE("values of all kinds go in and come out") {
  const Tensor x = leaf();
  const Tensor y = leaf();
  const auto function = [](const std::vector<Tensor>& both, std::optional<Tensor> none,
                           std::pair<double, Tensor> scaled, const std::string& word) {
    CHECK(word == "word");
    CHECK_FALSE(none.has_value());
    return std::make_pair(both[0] * both[1], (scaled.second * scaled.first).exp());
  };
  const auto loss = [&](const auto& outputs) { return (outputs.first * outputs.second).sum(); };
  const auto arguments = std::make_tuple(std::vector{x, y}, std::optional<Tensor>(),
                                         std::make_pair(0.5, y), std::string("word"));
  const auto plain = grad({loss(std::apply(function, arguments))}, {x, y});
  const auto found = std::apply(
      [&](const auto&... each) { return grad({loss(checkpoint(function, each...))}, {x, y}); },
      arguments);
  CHECK(equal(found, plain));
}

TEST_CASE("nothing is kept but the inputs, and what was recomputed goes as it is used") {
  const Tensor x = leaf();
  std::vector<c10::weak_intrusive_ptr<at::TensorImpl>> seen;
  const auto function = [&](const Tensor& value) {
    const Tensor once = value.exp();
    const Tensor twice = once.exp();
    seen.emplace_back(once.getIntrusivePtr());
    return twice.exp();
  };
  const Tensor loss = checkpoint(function, x).sum();
  CHECK(seen.at(0).expired());
  loss.backward({}, /*retain_graph=*/true);
  const Tensor first = x.grad().clone();
  CHECK(seen.size() == 2);
  CHECK(seen.at(1).expired());
  loss.backward();
  CHECK(seen.size() == 3);
  CHECK(torch::equal(x.grad(), 2 * first));
}

TEST_CASE("a second derivative goes through") {
  const Tensor x = leaf();
  const auto function = [](const Tensor& value) { return value.sin().exp(); };
  const auto second = [&](const Tensor& output) {
    const Tensor first = grad({output.sum()}, {x}, {}, true, /*create_graph=*/true)[0];
    return grad({first.square().sum()}, {x})[0];
  };
  CHECK(torch::equal(second(checkpoint(function, x)), second(function(x))));
}

TEST_CASE("a backward inside of the function works") {
  const Tensor x = leaf();
  for (const bool early_stop : {true, false}) {
    for (const bool retain : {true, false}) {
      const auto function = [&](const Tensor& value) {
        const Tensor z = value.sin().cos();
        return value.cos() * grad({z.sum()}, {value}, {}, retain)[0];
      };
      CheckpointOptions options;
      options.early_stop = early_stop;
      const auto plain = grad({function(x).sum()}, {x});
      CHECK(equal(grad({checkpoint(options, function, x).sum()}, {x}), plain));
    }
  }
}

TEST_CASE("a recomputation ends with the last tensor that is needed") {
  const Tensor x = leaf();
  for (const bool early_stop : {true, false}) {
    int tails = 0;
    const auto function = [&](const Tensor& value) {
      const Tensor result = value.exp();
      ++tails;
      return result;
    };
    CheckpointOptions options;
    options.early_stop = early_stop;
    checkpoint(options, function, x).sum().backward();
    CHECK(tails == (early_stop ? 1 : 2));
  }
}

TEST_CASE("without grad mode it is a plain call") {
  const at::NoGradGuard no_grad;
  CHECK_FALSE(checkpoint([](const Tensor& value) { return value.exp(); }, leaf()).requires_grad());
}

TEST_CASE("autocast is that of the forward") {
  torch::nn::Linear linear(8, 8);
  const Tensor x = leaf();
  const auto run = [&](bool checkpointed) {
    linear->zero_grad();
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const Tensor output = checkpointed ? checkpoint(linear, x) : linear(x);
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    output.exp().sum().backward();
    CHECK_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
    return std::vector{output.detach(), linear->weight.grad()};
  };
  const auto plain = run(false);
  CHECK(plain[0].scalar_type() == at::kBFloat16);
  CHECK(equal(run(true), plain));
}

TEST_CASE("an input that was changed in place is noticed") {
  const Tensor x = leaf();
  Tensor input = x * 1;
  const Tensor output = checkpoint([](const Tensor& value) { return value.exp(); }, input);
  input.add_(1);
  CHECK_THAT(test::error_of([&] { output.sum().backward(); }),
             Catch::Contains("modified by an inplace operation"));
}

TEST_CASE("a recomputation that does something else is an error that says what") {
  const Tensor x = leaf();
  int calls = 0;
  CheckpointOptions options;
  options.name = "f";
  options.early_stop = false;
  const auto error_of = [&](const std::function<Tensor(const Tensor&)>& function) {
    calls = 0;
    return checkpoint_error([&] { checkpoint(options, function, x).sum().backward(); });
  };
  CHECK_THAT(error_of([&](const Tensor& v) { return calls++ == 0 ? v.exp().exp() : v.exp(); }),
             Catch::Contains("the recomputation of f saved 1 tensors where the forward had saved "
                             "2"));
  CHECK_THAT(error_of([&](const Tensor& v) { return calls++ == 0 ? v.exp() : v.exp().exp(); }),
             Catch::Contains("saved more than the 1 tensors of the forward"));
  CHECK_THAT(
      error_of([&](const Tensor& v) { return (calls++ == 0 ? v : v.narrow(0, 0, 2)).exp(); }),
      Catch::Contains("tensor 0 is Float[2, 8] on cpu and was Float[4, 8] on cpu"));
}

TEST_CASE("what the function throws in a recomputation is the caller's, and the next step works") {
  const Tensor x = leaf();
  int calls = 0;
  const auto function = [&](const Tensor& value) {
    if (++calls == 2) {
      throw std::out_of_range("mine");
    }
    return value.exp();
  };
  const Tensor loss = checkpoint(function, x).sum();
  CHECK_THROWS_AS(loss.backward({}, /*retain_graph=*/true), std::out_of_range);
  loss.backward();
  CHECK(torch::equal(x.grad(), x.exp()));
}

TEST_CASE("threads checkpoint at once, and share a graph") {
  torch::nn::Sequential net(Block{}, Block{}, Block{});
  net->eval();
  const Tensor x = leaf();
  const auto plain = grad({net->forward(x).sum()}, {x});
  const Tensor shared = checkpoint_sequential(net, 3, x).sum();
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([&] {
      for (int round = 0; round < 20; ++round) {
        const Tensor own = checkpoint_sequential(net, 3, x).sum();
        wrong += equal(grad({own}, {x}), plain) ? 0 : 1;
        wrong += equal(grad({shared}, {x}, {}, /*retain_graph=*/true), plain) ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(wrong == 0);
}

}  // namespace
}  // namespace trireme
