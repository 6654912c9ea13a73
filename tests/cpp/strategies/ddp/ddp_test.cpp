// DDP over real Gloo groups, ranks as threads: N ranks must train as one process does on the whole
// batch.

#include <trireme/strategies/ddp/distributed_data_parallel.h>

#include <torch/csrc/autograd/autograd.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include <algorithm>
#include <catch_torch.h>
#include <mutex>
#include <thread_ranks.h>
#include <vector>

namespace trireme::ddp_test {

using trireme::test::run_thread_ranks;
using trireme::test::ThreadRank;

namespace {

// Seeding is global; building a net has to be one thread's business at a time.
std::mutex seed_mutex;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    const std::lock_guard<std::mutex> lock(seed_mutex);
    torch::manual_seed(7);
    first = register_module("first", torch::nn::Linear(6, 16));
    second = register_module("second", torch::nn::Linear(16, 4));
    head = register_module("head", torch::nn::Linear(16, 2));
    norm = register_module("norm", torch::nn::BatchNorm1d(6));
  }
  // With `heads` also the second output.
  std::pair<at::Tensor, std::optional<at::Tensor>> forward(const at::Tensor& x, bool heads) {
    const at::Tensor hidden = torch::relu(first(x));
    return {second(hidden), heads ? std::optional<at::Tensor>(head(hidden)) : std::nullopt};
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, head{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Net);

at::Tensor whole_batch(int64_t step) {
  return at::sin(at::arange(12 * 6, at::kDouble).view({12, 6}) * static_cast<double>(step + 1))
      .to(at::kFloat);
}

at::Tensor loss_of(const std::pair<at::Tensor, std::optional<at::Tensor>>& output) {
  at::Tensor loss = output.first.square().mean();
  if (output.second) loss = loss + output.second->square().mean();
  return loss;
}

template <typename Model>
void train(Model& model, int64_t steps, int64_t rank, int64_t world) {
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t share = 12 / world;
    const at::Tensor part = whole_batch(step).narrow(0, rank * share, share);
    optimizer.zero_grad();
    loss_of(model->forward(part, step % 2 == 0)).backward();
    optimizer.step();
  }
}

std::vector<at::Tensor> detached(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& parameter : parameters) copies.push_back(parameter.detach().clone());
  return copies;
}

}  // namespace

TEST_CASE("ranks train as one process does on the whole batch, with a head used every other step") {
  Net alone;
  train(alone, 6, 0, 1);
  const std::vector<at::Tensor> expected = detached(alone->parameters());
  for (const int64_t world : {1, 2, 3}) {
    std::vector<std::vector<at::Tensor>> results(static_cast<size_t>(world));
    run_thread_ranks(world, [&](ThreadRank& rank) {
      DdpOptions options;
      options.bucket_cap_mb = 1e-4;
      DistributedDataParallel<Net> ddp(Net(), rank.communicator, options);
      train(ddp, 6, rank.where.rank, world);
      results[static_cast<size_t>(rank.where.rank)] = detached(ddp->parameters());
    });
    for (const auto& parameters : results) {
      REQUIRE(parameters.size() == expected.size());
      for (size_t i = 0; i < expected.size(); ++i)
        CHECK(at::allclose(parameters[i], expected[i], 1e-5, 1e-6));
    }
  }
}

TEST_CASE("construction starts all ranks from rank 0") {
  std::vector<std::vector<at::Tensor>> results(2);
  run_thread_ranks(2, [&](ThreadRank& rank) {
    Net net;
    {
      const at::NoGradGuard no_grad;
      for (const at::Tensor& tensor : net->parameters())
        tensor.add_(static_cast<double>(rank.where.rank));
      net->norm->running_mean.add_(static_cast<double>(rank.where.rank));
    }
    DistributedDataParallel<Net> ddp(net, rank.communicator);
    auto tensors = detached(ddp->parameters());
    tensors.push_back(net->norm->running_mean.clone());
    results[static_cast<size_t>(rank.where.rank)] = tensors;
  });
  for (size_t i = 0; i < results[0].size(); ++i) CHECK(at::equal(results[0][i], results[1][i]));
}

TEST_CASE("no_sync accumulates and the next step averages") {
  std::vector<at::Tensor> grads(2);
  run_thread_ranks(2, [&](ThreadRank& rank) {
    DistributedDataParallel<Net> ddp(Net(), rank.communicator);
    const at::Tensor x = at::full({2, 6}, static_cast<double>(rank.where.rank + 1));
    {
      const auto guard = ddp->no_sync();
      loss_of(ddp->forward(x, true)).backward();
    }
    loss_of(ddp->forward(x, true)).backward();
    grads[static_cast<size_t>(rank.where.rank)] = ddp->module()->first->weight.grad().clone();
  });
  at::Tensor expected = at::zeros_like(grads[0]);
  for (const double value : {1.0, 2.0}) {
    Net alone;
    loss_of(alone->forward(at::full({2, 6}, value), true)).backward();
    expected += alone->first->weight.grad();  // twice per rank, half of the sum
  }
  for (const at::Tensor& grad : grads) CHECK(at::allclose(grad, expected, 1e-5, 1e-6));
}

TEST_CASE("a second derivative through .grad, summed up over the ranks, is that of one process") {
  const auto derive = [](const at::Tensor& loss, const std::vector<at::Tensor>& parameters) {
    loss.backward({}, /*keep_graph=*/true, /*create_graph=*/true);
    return torch::autograd::grad({parameters[0].grad().pow(2).sum()}, {parameters[0]})[0];
  };
  const auto part_of = [](int64_t rank) { return whole_batch(0).narrow(0, rank * 6, 6); };
  Net alone;
  const at::Tensor loss =
      (loss_of(alone->forward(part_of(0), true)) + loss_of(alone->forward(part_of(1), true))) / 2;
  const at::Tensor expected = derive(loss, alone->parameters());
  std::vector<at::Tensor> found(2);
  run_thread_ranks(2, [&](ThreadRank& rank) {
    DistributedDataParallel<Net> ddp(Net(), rank.communicator);
    at::Tensor& sum = found[static_cast<size_t>(rank.where.rank)];
    sum = derive(loss_of(ddp->forward(part_of(rank.where.rank), true)), ddp->parameters());
    rank.communicator->all_reduce({sum}, ReduceOp::kSum, "derivative").wait();
  });
  for (const at::Tensor& sum : found) CHECK(at::allclose(sum, expected, 1e-5, 1e-6));
}

namespace {

// What is left of the first layer's weight after rank r trained on its `inputs[r]` batches, and
// whose buffers all have.
std::vector<at::Tensor> train_uneven(std::vector<int64_t> inputs, const JoinOptions& join) {
  std::vector<at::Tensor> results(inputs.size());
  std::vector<int64_t> roots(inputs.size(), -1);
  run_thread_ranks(static_cast<int64_t>(inputs.size()), [&](ThreadRank& rank) {
    const size_t r = static_cast<size_t>(rank.where.rank);
    DistributedDataParallel<Net> ddp(Net(), rank.communicator);
    ddp->module()->norm->running_mean.fill_(static_cast<double>(r));
    torch::optim::SGD optimizer(ddp->parameters(), 0.1);
    ddp->join(
        [&] {
          for (int64_t step = 0; step < inputs[r]; ++step) {
            optimizer.zero_grad();
            loss_of(ddp->forward(whole_batch(step), true)).backward();
            optimizer.step();
          }
        },
        join);
    results[r] = ddp->module()->first->weight.detach().clone();
    roots[r] = ddp->module()->norm->running_mean[0].item<int64_t>();
  });
  const auto with_inputs =
      std::find_if(inputs.begin(), inputs.end(), [](int64_t n) { return n > 0; });
  const int64_t root = with_inputs == inputs.end() ? 0 : with_inputs - inputs.begin();
  CHECK(roots == std::vector<int64_t>(inputs.size(), root));
  return results;
}

// One process whose gradient of each step is scaled.
at::Tensor train_scaled(const std::vector<double>& scales) {
  Net net;
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  for (size_t step = 0; step < scales.size(); ++step) {
    optimizer.zero_grad();
    (loss_of(net->forward(whole_batch(static_cast<int64_t>(step)), true)) * scales[step])
        .backward();
    optimizer.step();
  }
  return net->first->weight.detach().clone();
}

}  // namespace

TEST_CASE("join: a rank without inputs keeps the others company") {
  JoinOptions active_only;
  active_only.divide_by_initial_world_size = false;
  for (const at::Tensor& weight : train_uneven({3, 1}, {}))
    CHECK(at::allclose(weight, train_scaled({1, 0.5, 0.5}), 1e-5, 1e-6));
  for (const at::Tensor& weight : train_uneven({1, 3}, active_only))
    CHECK(at::allclose(weight, train_scaled({1, 1, 1}), 1e-5, 1e-6));
  for (const at::Tensor& weight : train_uneven({0, 2, 1}, {}))
    CHECK(at::allclose(weight, train_scaled({2. / 3, 1. / 3}), 1e-5, 1e-6));
  for (const at::Tensor& weight : train_uneven({0, 0}, {}))
    CHECK(at::equal(weight, train_scaled({})));
}

TEST_CASE("join: the first rank to run out can end it for all") {
  JoinOptions together;
  together.throw_on_early_termination = true;
  std::vector<std::string> texts(2);
  run_thread_ranks(2, [&](ThreadRank& rank) {
    DistributedDataParallel<Net> ddp(Net(), rank.communicator);
    const auto train = [&] {
      for (int64_t step = 0; step <= rank.where.rank; ++step)
        loss_of(ddp->forward(whole_batch(step), true)).backward();
    };
    try {
      ddp->join(train, together);
    } catch (const c10::Error& error) {
      texts[static_cast<size_t>(rank.where.rank)] = error.what_without_backtrace();
    }
    loss_of(ddp->forward(whole_batch(0), true)).backward();  // the group still works
  });
  for (const std::string& text : texts) CHECK_THAT(text, Catch::Contains("rank 0 has none left"));
}

TEST_CASE("join: an exception in one rank's loop reaches the others") {
  std::vector<std::string> texts(2);
  run_thread_ranks(2, [&](ThreadRank& rank) {
    DistributedDataParallel<Net> ddp(Net(), rank.communicator);
    try {
      ddp->join([&] {
        TORCH_CHECK(rank.where.rank == 0, "the loader broke");
        loss_of(ddp->forward(whole_batch(0), true)).backward();
      });
    } catch (const c10::Error& error) {
      texts[static_cast<size_t>(rank.where.rank)] = error.what_without_backtrace();
    }
  });
  for (const std::string& text : texts) CHECK_THAT(text, Catch::Contains("the loader broke"));
}

TEST_CASE("ranks with different models all raise, naming parameter and rank") {
  std::vector<std::string> texts(2);
  run_thread_ranks(2, [&](ThreadRank& rank) {
    torch::nn::Linear layer(4, rank.where.rank == 0 ? 3 : 5);
    try {
      DistributedDataParallel<torch::nn::Linear> ddp(layer, rank.communicator);
    } catch (const c10::Error& error) {
      texts[static_cast<size_t>(rank.where.rank)] = error.what_without_backtrace();
    }
  });
  for (const std::string& text : texts) {
    CHECK_THAT(text, Catch::Contains("on rank 1: parameter 0 is 'weight' Float [5, 4] but rank 0 "
                                     "has 'weight' Float [3, 4]"));
  }
}

namespace {

// What a user may do to a net in mid-run.
void change(Net& net, int64_t which) {
  const at::NoGradGuard no_grad;
  const std::lock_guard<std::mutex> lock(seed_mutex);
  torch::manual_seed(11);
  if (which == 0) net->head = net->replace_module("head", torch::nn::Linear(16, 5));
  if (which == 1) {
    net->second->weight.set_data(at::ones({300, 16}) * 0.1);
    net->second->bias.set_data(at::ones({300}));
  }
  if (which == 2) net->unregister_module("head");
}

}  // namespace

TEST_CASE("a module that changes alike on all ranks goes on as if wrapped anew") {
  for (const int64_t which : {0, 1, 2}) {
    std::vector<std::vector<at::Tensor>> results(2);
    run_thread_ranks(2, [&](ThreadRank& rank) {
      const int64_t r = rank.where.rank;
      Net net;
      DistributedDataParallel<Net> ddp(net, rank.communicator);
      train(ddp, 2, r, 2);
      for (const at::Tensor& parameter : ddp->parameters()) parameter.mutable_grad().reset();
      change(net, which);
      train(ddp, 4, r, 2);
      results[static_cast<size_t>(r)] = detached(net->parameters());
    });
    Net alone;
    train(alone, 2, 0, 1);
    for (const at::Tensor& parameter : alone->parameters()) parameter.mutable_grad().reset();
    change(alone, which);
    train(alone, 4, 0, 1);
    const std::vector<at::Tensor> expected = detached(alone->parameters());
    REQUIRE(results[0].size() == expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      CHECK(at::equal(results[0][i], results[1][i]));
      CHECK(at::allclose(results[0][i], expected[i], 1e-5, 1e-6));
    }
  }
}

TEST_CASE("a module that changes on one rank alone raises on all, with what it was and is") {
  for (const auto& [which, text] : std::vector<std::pair<int64_t, std::string>>{
           {0, "on rank 1: 'head.weight' was Float [2, 16], is another tensor, Float [5, 16]"},
           {1, "on rank 1: 'second.weight' was Float [4, 16], is Float [300, 16]"},
           {2, "on rank 1: 'head.weight' Float [2, 16] is gone"}}) {
    std::vector<std::string> texts(2);
    run_thread_ranks(2, [&](ThreadRank& rank) {
      Net net;
      DistributedDataParallel<Net> ddp(net, rank.communicator);
      train(ddp, 2, rank.where.rank, 2);
      if (rank.where.rank == 1) change(net, which);
      try {
        train(ddp, 1, rank.where.rank, 2);
      } catch (const c10::ValueError& error) {
        texts[static_cast<size_t>(rank.where.rank)] = error.what_without_backtrace();
      }
    });
    for (const std::string& found : texts) {
      CHECK_THAT(found, Catch::Contains("[ddp] got other parameters than were planned") &&
                            Catch::Contains("on rank 0: nothing changed") && Catch::Contains(text));
    }
  }
}

TEST_CASE("an exception on one rank comes out of the other's backward") {
  std::vector<std::string> texts(2);
  run_thread_ranks(2, [&](ThreadRank& rank) {
    DistributedDataParallel<Net> ddp(Net(), rank.communicator);
    auto output = ddp->forward(at::ones({2, 6}), true);
    if (rank.where.rank == 1) {
      ddp->module()->first->weight.register_hook(
          [](const at::Tensor&) { TORCH_CHECK(false, "rank 1's own error"); });
    }
    try {
      loss_of(output).backward();
    } catch (const c10::Error& error) {
      texts[static_cast<size_t>(rank.where.rank)] = error.what_without_backtrace();
    }
  });
  CHECK_THAT(texts[1], Catch::Contains("rank 1's own error"));
  CHECK_THAT(texts[0],
             Catch::Contains("backward 1 was abandoned") && Catch::Contains("(rank 1 of 2)"));
}

TEST_CASE("a module without trainable parameters is refused") {
  std::string text;
  run_thread_ranks(1, [&](ThreadRank& rank) {
    try {
      DistributedDataParallel<torch::nn::ReLU> ddp(torch::nn::ReLU(), rank.communicator);
    } catch (const c10::Error& error) {
      text = error.what_without_backtrace();
    }
  });
  CHECK_THAT(text, Catch::Contains("[ddp] got a module without trainable parameters"));
}

TEST_CASE("outputs are searched for tensors wherever they hide") {
  const at::Tensor t = at::ones({1});
  CHECK(find_tensors(t).size() == 1);
  CHECK(find_tensors(std::vector<at::Tensor>{t, t}).size() == 2);
  CHECK(find_tensors(std::make_tuple(t, 3, std::make_pair(t, std::string("x")))).size() == 2);
  CHECK(find_tensors(std::map<std::string, std::vector<at::Tensor>>{{"a", {t, t}}}).size() == 2);
  CHECK(find_tensors(std::optional<at::Tensor>()).empty());
  CHECK(find_tensors(std::array<at::Tensor, 2>{t, at::Tensor()}).size() == 1);
  CHECK(find_tensors(std::string("none")).empty());
}

}  // namespace trireme::ddp_test
