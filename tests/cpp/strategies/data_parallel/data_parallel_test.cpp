// DataParallel trains as one process does on the whole batch.

#include <torch/autograd.h>
#include <torch/serialize.h>

#include <atomic>
#include <catch_torch.h>
#include <sstream>
#include <strategies/data_parallel/replicated_nets.h>
#include <thread>
#include <vector>

namespace trireme::data_parallel_test {

using namespace trireme::test;

namespace {

// Two layers that have one matrix.
struct TiedImpl : torch::nn::Cloneable<TiedImpl> {
  TiedImpl() { reset(); }
  void reset() override {
    there = register_module("there", torch::nn::Linear(4, 4));
    back = register_parameter("back", there->weight);
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(torch::tanh(there(x)), back.t()); }
  torch::nn::Linear there{nullptr};
  at::Tensor back;
};
TORCH_MODULE(Tied);

struct NormedImpl : torch::nn::Cloneable<NormedImpl> {
  NormedImpl() { reset(); }
  void reset() override { norm = register_module("norm", torch::nn::BatchNorm1d(4)); }
  at::Tensor forward(const at::Tensor& x) { return norm(x); }
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Normed);

struct NoisyImpl : torch::nn::Cloneable<NoisyImpl> {
  explicit NoisyImpl(double p = 0.5) : p(p) { reset(); }
  void reset() override { scale = register_parameter("scale", torch::ones({1})); }
  at::Tensor forward(const at::Tensor& x) { return at::dropout(x * scale, p, is_training()); }
  double p;
  at::Tensor scale;
};
TORCH_MODULE(Noisy);

}  // namespace

TEST_CASE("training equals one process on the whole batch") {
  for (const int64_t rows : {8, 7}) {
    auto alone = seeded<Layers>();
    const Values expected = train(alone, 5, rows);
    for (const int64_t replicas : {1, 2, 3}) {
      CAPTURE(rows, replicas);
      auto net = seeded<Layers>();
      DataParallel<Layers> model(net, on_cpu(replicas));
      CHECK(count_unlike(train(model, 5, rows), expected, 1e-4, 1e-4) == 0);
      CHECK(model->devices().size() == static_cast<size_t>(replicas));
    }
  }
}

TEST_CASE("sums of whole numbers are the same to the bit") {
  const at::Tensor x = whole_rows(11);
  WholeNumbers alone;
  const at::Tensor expected = alone->forward(x);
  expected.sum().backward();
  for (const int64_t replicas : {2, 3, 5}) {
    CAPTURE(replicas);
    WholeNumbers net;
    DataParallel<WholeNumbers> model(net, on_cpu(replicas));
    const at::Tensor output = model->forward(x);
    output.sum().backward();
    CHECK(at::equal(output, expected));
    CHECK(count_unlike(gradients_of(*net), gradients_of(*alone), 0) == 0);
    CHECK_FALSE(net->unused.grad().defined());
    CHECK_FALSE(net->frozen.grad().defined());
  }
}

TEST_CASE("the same bits in every run") {
  const auto run = [] {
    auto net = seeded<Layers>();
    DataParallel<Layers> model(net, on_cpu(3));
    return train(model, 5, 10);
  };
  CHECK(count_unlike(run(), run(), 0) == 0);
}

TEST_CASE("random numbers are settled by the seed, and cloning draws none") {
  const at::Tensor x = at::ones({12, 50});
  const auto run = [&] {
    torch::manual_seed(3);
    DataParallel<Noisy> model(Noisy(), on_cpu(2));
    const at::Tensor next = at::rand({});
    return Values{model->forward(x), model->forward(x), next};
  };
  const Values first = run();
  CHECK(count_unlike(run(), first, 0) == 0);
  CHECK_FALSE(at::equal(first[0], first[1]));
  CHECK_FALSE(at::equal(first[0].narrow(0, 0, 6), first[0].narrow(0, 6, 6)));
  torch::manual_seed(3);
  CHECK(at::equal(at::rand({}), first[2]));
}

TEST_CASE("the loss is computed by replicas, its mean is that of the batch") {
  for (const int64_t rows : {8, 7}) {
    auto alone = seeded<Layers>();
    const at::Tensor expected =
        cross_entropy(alone->forward(characters(1, rows)), classes(1, rows));
    expected.backward();
    for (const int64_t replicas : {1, 2, 3}) {
      CAPTURE(rows, replicas);
      auto net = seeded<Layers>();
      DataParallel<Layers> model(net, on_cpu(replicas));
      const at::Tensor loss = model->loss(cross_entropy, classes(1, rows), characters(1, rows));
      CHECK(loss.dim() == 0);
      loss.backward();
      CHECK(at::allclose(loss, expected));
      CHECK(count_unlike(gradients_of(*net), gradients_of(*alone), 1e-5, 1e-5) == 0);
    }
  }
}

TEST_CASE("gradients accumulate until they are set to zero, and a graph may be kept") {
  const at::Tensor x = whole_rows(6);
  WholeNumbers alone;
  WholeNumbers net;
  DataParallel<WholeNumbers> model(net, on_cpu(2));
  const auto equal = [&] { return count_unlike(gradients_of(*net), gradients_of(*alone), 0) == 0; };
  for (int round = 0; round < 2; ++round) {
    model->forward(x).sum().backward();
    alone->forward(x).sum().backward();
    CHECK(equal());
  }
  model->zero_grad();
  alone->zero_grad();
  const at::Tensor of_model = model->forward(x).square().sum();
  const at::Tensor of_alone = alone->forward(x).square().sum();
  for (int round = 0; round < 3; ++round) {
    of_model.backward({}, /*retain_graph=*/true);
    of_alone.backward({}, /*retain_graph=*/true);
    CHECK(equal());
  }
  of_model.backward();
  CHECK_THROWS_WITH(of_model.backward(), Catch::Contains("second"));
}

TEST_CASE("two forwards before a backward, and two in one graph") {
  WholeNumbers alone;
  WholeNumbers net;
  DataParallel<WholeNumbers> model(net, on_cpu(2));
  const auto run = [](auto& module) {
    const at::Tensor first = module->forward(whole_rows(6)).sum();
    const at::Tensor second = module->forward(whole_rows(9)).sum();
    second.backward();
    first.backward();
    (module->forward(whole_rows(3)).sum() + module->forward(whole_rows(8)).sum()).backward();
  };
  run(alone);
  run(model);
  CHECK(count_unlike(gradients_of(*net), gradients_of(*alone), 0) == 0);
}

TEST_CASE("forwards of several threads come one after the other") {
  const at::NoGradGuard no_grad;
  WholeNumbers net;
  DataParallel<WholeNumbers> model(net, on_cpu(2));
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> expected;
  for (const int64_t rows : {6, 7, 8}) {
    inputs.push_back(whole_rows(rows));
    expected.push_back(net->forward(inputs.back()));
  }
  std::atomic<int64_t> differ = 0;
  std::vector<std::thread> threads;
  for (size_t caller = 0; caller < inputs.size(); ++caller)
    threads.emplace_back([&, caller] {
      const at::NoGradGuard no_grad_here;
      for (int64_t call = 0; call < 50; ++call)
        differ += !model->forward(inputs[caller]).equal(expected[caller]);
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(differ == 0);
}

TEST_CASE("gradients of inputs, by backward and by grad") {
  WholeNumbers net;
  DataParallel<WholeNumbers> model(net, on_cpu(3));
  const at::Tensor mine = whole_rows(7).requires_grad_(true);
  const at::Tensor theirs = whole_rows(7).requires_grad_(true);
  model->forward(mine * 2).square().sum().backward();
  net->zero_grad();
  net->forward(theirs * 2).square().sum().backward();
  CHECK(at::equal(mine.grad(), theirs.grad()));
  net->zero_grad();
  const Values found = torch::autograd::grad({model->forward(mine).sum()}, {mine, net->second});
  const Values expected =
      torch::autograd::grad({net->forward(theirs).sum()}, {theirs, net->second});
  CHECK(count_unlike(found, expected, 0) == 0);
  CHECK_FALSE(net->second.grad().defined());
}

TEST_CASE("hooks of parameters see one gradient, that of the module") {
  WholeNumbers net;
  DataParallel<WholeNumbers> model(net, on_cpu(2));
  int calls = 0;
  net->first.register_hook([&](const at::Tensor& gradient) {
    ++calls;
    return gradient * 2;
  });
  model->forward(whole_rows(4)).sum().backward();
  WholeNumbers alone;
  alone->forward(whole_rows(4)).sum().backward();
  CHECK(calls == 1);
  CHECK(at::equal(net->first.grad(), alone->first.grad() * 2));
  CHECK(at::equal(net->second.grad(), alone->second.grad()));
}

TEST_CASE("frozen parameters are left alone, and trained from when they are unfrozen") {
  WholeNumbers net;
  WholeNumbers alone;
  DataParallel<WholeNumbers> model(net, on_cpu(2));
  for (const bool trained : {false, true, false}) {
    for (const WholeNumbers& module : {net, alone}) {
      WholeNumbers(module)->zero_grad();
      at::Tensor(module->first).set_requires_grad(trained);
      at::Tensor(module->frozen).set_requires_grad(trained);
    }
    model->forward(whole_rows(5)).sum().backward();
    alone->forward(whole_rows(5)).sum().backward();
    CHECK(net->first.grad().defined() == trained);
    CHECK(count_unlike(gradients_of(*net), gradients_of(*alone), 0) == 0);
  }
}

TEST_CASE("a parameter in two places gets the sum") {
  auto net = seeded<Tied>();
  auto alone = seeded<Tied>();
  const at::Tensor x = whole_rows(6);
  DataParallel<Tied> model(net, on_cpu(2));
  model->forward(x).square().sum().backward();
  alone->forward(x).square().sum().backward();
  CHECK(net->back.is_same(net->there->weight));
  CHECK(count_unlike(gradients_of(*net), gradients_of(*alone), 1e-5, 1e-5) == 0);
  torch::optim::SGD(std::vector<at::Tensor>{net->there->weight}, 0.1).step();
  const at::NoGradGuard no_grad;
  CHECK(at::allclose(model->forward(x), net->forward(x)));
}

TEST_CASE("BatchNorm keeps the statistics that replica 0 has seen, and eval uses them") {
  const at::Tensor x = whole_rows(8) * at::arange(8).view({8, 1});
  Normed net;
  DataParallel<Normed> model(net, on_cpu(2));
  Normed first_half;
  for (int step = 0; step < 3; ++step) {
    model->forward(x + step);
    first_half->forward((x + step).narrow(0, 0, 4));
    CHECK(at::equal(net->norm->running_mean, first_half->norm->running_mean));
    CHECK(at::equal(net->norm->running_var, first_half->norm->running_var));
    CHECK(net->norm->num_batches_tracked.item<int64_t>() == step + 1);
  }
  SECTION("of the wrapper or of the module alike") {
    model->eval();
    CHECK(at::allclose(model->forward(x), net->forward(x)));
    net->train();
    model->forward(x);
    CHECK(net->norm->num_batches_tracked.item<int64_t>() == 4);
    net->eval();
    CHECK(at::allclose(model->forward(x), net->forward(x)));
    CHECK(net->norm->num_batches_tracked.item<int64_t>() == 4);
  }
}

TEST_CASE("two forwards with BatchNorm before a backward") {
  Normed net;
  DataParallel<Normed> model(net, on_cpu(2));
  for (const bool training : {true, false}) {
    model->train(training);
    const at::Tensor first = model->forward(whole_rows(8));
    (first + model->forward(whole_rows(8) + 1)).square().sum().backward();
    CHECK(net->norm->weight.grad().defined());
  }
}

TEST_CASE("without gradients nothing is recorded") {
  WholeNumbers net;
  DataParallel<WholeNumbers> model(net, on_cpu(2));
  const at::NoGradGuard no_grad;
  const at::Tensor output = model->forward(whole_rows(5));
  CHECK_FALSE(output.requires_grad());
  CHECK(at::equal(output, net->forward(whole_rows(5))));
}

TEST_CASE("a step between forwards costs no copy, and is seen") {
  auto net = seeded<Layers>();
  DataParallel<Layers> model(net, on_cpu(2));
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  for (int64_t step = 0; step < 3; ++step) {
    model->forward(characters(step, 8)).square().sum().backward();
    optimizer.step();
    const ReplicasReport report = model->last_step();
    CHECK(report.step == step + 1);
    CHECK(report.copied_bytes == 0);
    REQUIRE(report.replicas.size() == 2);
    for (const ReplicaReport& replica : report.replicas) {
      CHECK(replica.rows == 4);
      CHECK(replica.memory_bytes == 0);
      CHECK(replica.forward_ms > 0);
      CHECK(replica.backward_ms > 0);
      CHECK((replica.waiting_share >= 0 && replica.waiting_share < 1));
    }
  }
  const at::NoGradGuard no_grad;
  CHECK(at::allclose(model->forward(characters(0, 8)), net->forward(characters(0, 8))));
}

TEST_CASE("a graph kept over a step raises") {
  auto net = seeded<Layers>();
  DataParallel<Layers> model(net, on_cpu(2));
  torch::optim::AdamW optimizer(model->parameters());  // SGD writes past the version
  const at::Tensor loss = model->forward(characters(0, 8)).square().sum();
  loss.backward({}, /*retain_graph=*/true);
  optimizer.step();
  CHECK_THROWS_WITH(loss.backward(), Catch::Contains("modified by an inplace operation"));
}

TEST_CASE("a module that is cast or changed is followed") {
  Noisy net(0.0);
  DataParallel<Noisy> model(net, on_cpu(2));
  const at::Tensor x = at::ones({4, 50});
  model->to(at::kDouble);
  CHECK(model->forward(x.to(at::kDouble)).scalar_type() == at::kDouble);
  model->to(at::kFloat);
  net->p = 0.9;
  CHECK(at::equal(model->forward(x), x));  // replicas have the p that they were made with
  model->replicate();
  CHECK_FALSE(at::equal(model->forward(x), x));
}

TEST_CASE("statistics that were loaded reach all replicas") {
  Normed trained;
  trained->norm->running_mean.fill_(5);
  std::stringstream saved;
  torch::save(trained, saved);
  Normed net;
  DataParallel<Normed> model(net, on_cpu(2));
  model->forward(whole_rows(4));
  torch::load(net, saved);
  model->eval();
  trained->eval();
  CHECK(at::equal(model->forward(whole_rows(4)), trained->forward(whole_rows(4))));
}

TEST_CASE("a wrapper is a module: names, archives, clones") {
  auto net = seeded<Layers>();
  DataParallel<Layers> model(net, on_cpu(2));
  const auto names = model->named_parameters().keys();
  REQUIRE(names.size() == net->parameters().size());
  CHECK(names.front() == "module.embed.weight");
  CHECK(model->module().ptr() == net.ptr());
  std::stringstream saved;
  torch::save(model, saved);
  DataParallel<Layers> loaded(Layers(), on_cpu(3));
  torch::load(loaded, saved);
  const at::NoGradGuard no_grad;
  const at::Tensor expected = model->forward(characters(0, 6));
  CHECK(at::allclose(loaded->forward(characters(0, 6)), expected));
  const auto clone = std::dynamic_pointer_cast<DataParallelImpl<Layers>>(model->clone());
  REQUIRE(clone);
  net->embed->weight.zero_();
  CHECK(at::allclose(clone->forward(characters(0, 6)), expected));
  CHECK(clone->devices().size() == 2);
  CHECK_FALSE(at::equal(model->forward(characters(0, 6)), expected));
}

}  // namespace trireme::data_parallel_test
