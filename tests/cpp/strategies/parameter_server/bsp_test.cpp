// mode bsp: pushes of a clock are added in the order of workers, and make one step.

#include <atomic>
#include <strategies/parameter_server/ps_ranks.h>
#include <thread>
#include <vector>

namespace trireme::bsp_test {

using namespace trireme::test;

namespace {

constexpr int64_t kClocks = 6;

// What one process makes of the same gradients: their sum in the order of workers, divided, and one
// step of torch's optimizer.
template <typename Torch, typename TorchOptions>
Values one_process(int64_t workers, const TorchOptions& options, ps::Reduction reduction,
                   int64_t pushes = 1) {
  torch::nn::Sequential net = two_layers();
  const Values parameters = net->parameters();
  Torch optimizer(parameters, options);
  for (int64_t clock = 0; clock < kClocks; ++clock) {
    Values sums(parameters.size());
    for (int64_t worker = 0; worker < workers; ++worker) {
      Values own;
      for (int64_t push = 0; push < pushes; ++push) {
        const Values more = drawn_gradients(parameters, worker, clock + 100 * push);
        for (size_t i = 0; i < more.size(); ++i)
          push == 0 ? own.push_back(more[i]) : void(own[i] = own[i] + more[i]);
      }
      for (size_t i = 0; i < own.size(); ++i) sums[i] = worker == 0 ? own[i] : sums[i] + own[i];
    }
    if (reduction == ps::Reduction::kMean)
      for (at::Tensor& sum : sums) sum = sum / static_cast<double>(workers);
    set_gradients(parameters, sums);
    optimizer.step();
  }
  return copies_of(parameters);
}

Values through_server(ThreadRank& rank, ps::Optimizer optimizer, ps::Reduction reduction,
                      int64_t pushes = 1) {
  torch::nn::Sequential net = two_layers();
  ps::ParameterServer server(
      rank.communicator, {ps::dense("net", net, std::move(optimizer), {.reduction = reduction})});
  ps::DenseTable& table = server.dense("net");
  for (int64_t clock = 0; clock < kClocks; ++clock) {
    table.pull();
    for (int64_t push = 0; push < pushes; ++push) {
      set_gradients(net->parameters(),
                    drawn_gradients(net->parameters(), rank.where.rank, clock + 100 * push));
      table.push();
    }
    server.clock();
  }
  table.pull();
  return copies_of(net->parameters());
}

}  // namespace

TEST_CASE("SGD has the bits of one process, for any number of workers") {
  for (const int64_t workers : {1, 2, 3, 4}) {
    for (const ps::Reduction reduction : {ps::Reduction::kMean, ps::Reduction::kSum}) {
      CAPTURE(workers, reduction);
      const auto options = torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01);
      const Values expected = one_process<torch::optim::SGD>(workers, options, reduction);
      const auto got = on_workers<Values>(workers, [&](ThreadRank& rank) {
        return through_server(rank, ps::SGD{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01},
                              reduction);
      });
      for (const Values& values : got) {
        CHECK(count_unlike(values, got[0], 0) == 0);
        CHECK(count_unlike(values, expected, 1e-6, 1e-7) == 0);
      }
    }
  }
}

TEST_CASE("whole-number gradients give synchronous SGD bit for bit") {
  const auto got = on_workers<Values>(4, [](ThreadRank& rank) {
    ps::ParameterServer server(rank.communicator, {zeros_table("t", 40000, ps::SGD{.lr = 0.5})});
    ps::DenseTable& table = server.dense("t");
    Values seen;
    for (int64_t clock = 0; clock < kClocks; ++clock) {
      seen.push_back(table.pull_tensors()["x"]);
      table.push_tensors(named_x(at::arange(40000, at::kFloat).remainder(7) *
                                 static_cast<float>(rank.where.rank + clock)));
      server.clock();
    }
    seen.push_back(table.pull_tensors()["x"]);
    return seen;
  });
  at::Tensor x = at::zeros({40000});
  for (int64_t clock = 0; clock <= kClocks; ++clock) {
    CAPTURE(clock);
    for (const Values& seen : got) CHECK(at::equal(seen[static_cast<size_t>(clock)], x));
    at::Tensor sum = at::zeros({40000});
    for (int64_t worker = 0; worker < 4; ++worker)
      sum += at::arange(40000, at::kFloat).remainder(7) * static_cast<float>(worker + clock);
    x = x - 0.5 * (sum / 4);
  }
}

TEST_CASE("other optimizers step as torch's") {
  const auto check = [](const Values& expected, const ps::Optimizer& optimizer) {
    const auto got = on_workers<Values>(
        2, [&](ThreadRank& rank) { return through_server(rank, optimizer, ps::Reduction::kMean); });
    CHECK(count_unlike(got[0], got[1], 0) == 0);
    CHECK(count_unlike(got[0], expected, 1e-5, 1e-6) == 0);
  };
  const ps::Reduction mean = ps::Reduction::kMean;
  check(one_process<torch::optim::Adam>(2, torch::optim::AdamOptions(0.01), mean),
        ps::Adam{.lr = 0.01});
  check(
      one_process<torch::optim::AdamW>(2, torch::optim::AdamWOptions(0.01).weight_decay(0.1), mean),
      ps::AdamW{.lr = 0.01, .weight_decay = 0.1});
  check(one_process<torch::optim::Adagrad>(2, torch::optim::AdagradOptions(0.05), mean),
        ps::Adagrad{.lr = 0.05});
}

TEST_CASE("several pushes of a clock add up") {
  const auto options = torch::optim::SGDOptions(0.1);
  const Values expected = one_process<torch::optim::SGD>(2, options, ps::Reduction::kMean, 3);
  const auto got = on_workers<Values>(2, [](ThreadRank& rank) {
    return through_server(rank, ps::SGD{.lr = 0.1}, ps::Reduction::kMean, 3);
  });
  CHECK(count_unlike(got[0], expected, 1e-5, 1e-6) == 0);
}

TEST_CASE("a pull does not show pushes of the open clock, one's own neither") {
  const auto seen = on_workers<std::vector<double>>(2, [](ThreadRank& rank) {
    ps::ParameterServer server(rank.communicator, {zeros_table("t", 1, ps::Sum{})});
    ps::DenseTable& table = server.dense("t");
    std::vector<double> seen;
    for (int64_t clock = 0; clock < 3; ++clock) {
      table.push_tensors(named_x(at::ones({1})), /*scale=*/4);
      seen.push_back(table.pull_tensors()["x"].item<double>());
      server.clock();
    }
    return seen;
  });
  for (const auto& values : seen) CHECK(values == std::vector<double>{0, 4, 8});
}

TEST_CASE("tensors that nobody has pushed are not stepped, others divide by all workers") {
  const auto seen = on_workers<Values>(2, [](ThreadRank& rank) {
    ps::NamedTensors tensors;
    for (const char* name : {"a", "b", "c"}) tensors.insert(name, at::ones({2}));
    ps::ParameterServer server(rank.communicator,
                               {ps::dense("t", tensors, ps::SGD{.lr = 1, .weight_decay = 0.5})});
    ps::DenseTable& table = server.dense("t");
    ps::NamedTensors gradients;
    gradients.insert("a", at::ones({2}));
    if (rank.where.rank == 1) gradients.insert("b", at::ones({2}) * 4);
    table.push_tensors(gradients);
    server.clock();
    return table.pull_tensors().values();
  });
  for (const Values& values : seen) {
    CHECK(at::equal(values[0], at::full({2}, 1 - (1 + 0.5))));
    CHECK(at::equal(values[1], at::full({2}, 1 - (2 + 0.5))));
    CHECK(at::equal(values[2], at::ones({2})));
  }
}

TEST_CASE("bf16 and fp64 tables are summed and stepped in their wide dtype") {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf, at::kDouble}) {
    CAPTURE(dtype);
    const auto seen = on_workers<at::Tensor>(3, [&](ThreadRank& rank) {
      ps::ParameterServer server(
          rank.communicator,
          {ps::dense("t", named_x(at::ones({5000}, dtype)), ps::SGD{.lr = 0.1})});
      server.dense("t").push_tensors(
          named_x(drawn_gradients({at::ones({5000}, dtype)}, rank.where.rank, 0)[0]));
      server.clock();
      return server.dense("t").pull_tensors()["x"];
    });
    const at::ScalarType wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
    at::Tensor sum = at::zeros({5000}, wide);
    for (int64_t worker = 0; worker < 3; ++worker)
      sum = sum + drawn_gradients({at::ones({5000}, dtype)}, worker, 0)[0].to(wide);
    const at::Tensor expected = at::ones({5000}, wide) - sum / 3 * 0.1;
    for (const at::Tensor& tensor : seen) {
      CHECK(tensor.scalar_type() == dtype);
      CHECK(at::allclose(tensor.to(at::kDouble), expected.to(at::kDouble),
                         dtype == at::kDouble ? 1e-14 : 8e-3));
      CHECK(at::equal(tensor, seen[0]));
    }
  }
}

TEST_CASE("a push waits while the clock before the last is not applied") {
  std::atomic<int64_t> pushed{0};
  std::atomic<bool> is_late{true};
  const auto seen = on_workers<double>(2, [&](ThreadRank& rank) {
    ps::ParameterServer server(rank.communicator, {zeros_table("t", 1, ps::Sum{})});
    ps::DenseTable& table = server.dense("t");
    if (rank.where.rank == 1) {
      while (pushed < 2) std::this_thread::yield();
      is_late = pushed == 2;  // the third one waits
    }
    for (int64_t clock = 0; clock < 3; ++clock) {
      table.push_tensors(named_x(at::ones({1})));
      if (rank.where.rank == 0) ++pushed;
      server.clock();
    }
    return table.pull_tensors()["x"].item<double>();
  });
  CHECK(is_late);
  CHECK(seen == std::vector<double>{3, 3});
}

TEST_CASE("a learning rate holds from its clock on, whoever applies it") {
  const auto seen = on_workers<std::vector<double>>(3, [](ThreadRank& rank) {
    ps::ParameterServer server(rank.communicator, {zeros_table("t", 1, ps::SGD{.lr = 1})});
    ps::DenseTable& table = server.dense("t");
    std::vector<double> seen;
    for (int64_t clock = 0; clock < 6; ++clock) {
      if (clock == 2) table.set_lr(0.5);
      if (clock == 4 && rank.where.rank == 2) table.set_lr(0.25);
      table.push_tensors(named_x(-at::ones({1})));
      server.clock();
      seen.push_back(table.pull_tensors()["x"].item<double>());
    }
    return seen;
  });
  for (const auto& values : seen) CHECK(values == std::vector<double>{1, 2, 2.5, 3, 3.25, 3.5});
}

TEST_CASE("backup: a clock is committed without the last worker, whose pushes are dropped") {
  std::atomic<int64_t> ahead{0};
  const auto seen = on_workers<std::vector<int64_t>>(3, [&](ThreadRank& rank) {
    ps::ParameterServer server(rank.communicator, {zeros_table("t", 1, ps::Sum{})}, {.backup = 1});
    ps::DenseTable& table = server.dense("t");
    std::vector<int64_t> seen;
    if (rank.where.rank == 2) {
      table.push_tensors(named_x(at::full({1}, 100.0)));
      while (ahead < 2) std::this_thread::yield();
      table.push_tensors(named_x(at::full({1}, 100.0)));  // comes too late
      seen.push_back(table.pull_tensors()["x"].item<int64_t>());
      seen.push_back(server.clock());
      seen.push_back(server.stats().dropped);
      return seen;
    }
    for (int64_t clock = 0; clock < 4; ++clock) {
      table.push_tensors(named_x(at::full({1}, 2.0 + 2.0 * static_cast<double>(rank.where.rank))));
      server.clock();
      seen.push_back(table.pull_tensors()["x"].item<int64_t>());
    }
    ++ahead;
    seen.push_back(server.stats().dropped);
    return seen;
  });
  // The mean is over the two that came: 2 and 4.
  CHECK(seen[0] == std::vector<int64_t>{3, 6, 9, 12, 0});
  CHECK(seen[1] == std::vector<int64_t>{3, 6, 9, 12, 0});
  CHECK(seen[2] == std::vector<int64_t>{12, 4, 2});
}

TEST_CASE("backup: every push is taken or counted as dropped") {
  const auto seen = on_workers<std::vector<int64_t>>(4, [&](ThreadRank& rank) {
    ps::ParameterServer server(rank.communicator,
                               {zeros_table("t", 4, ps::Sum{}, {.reduction = ps::Reduction::kSum})},
                               {.backup = 2});
    ps::DenseTable& table = server.dense("t");
    at::Tensor gradient = at::zeros({4});
    gradient[rank.where.rank] = 1;
    int64_t clock = 0;
    while (clock < 200) {
      if (clock % (rank.where.rank + 2) == 0) std::this_thread::yield();
      table.push_tensors(named_x(gradient));
      clock = server.clock();
      table.pull_tensors();
    }
    rank.communicator->barrier("all have clocked").wait();
    const at::Tensor counts = table.pull_tensors()["x"];
    const ps::Stats stats = server.stats();
    return std::vector<int64_t>{counts[rank.where.rank].item<int64_t>() + stats.dropped,
                                stats.pushes};
  });
  for (const auto& counts : seen) CHECK(counts[0] == counts[1]);
}

TEST_CASE("who has left is not waited for; what it pushed in its open clock is dropped") {
  const auto seen = on_workers<double>(3, [](ThreadRank& rank) {
    ps::ParameterServer server(
        rank.communicator, {zeros_table("t", 1, ps::Sum{}, {.reduction = ps::Reduction::kSum})});
    ps::DenseTable& table = server.dense("t");
    for (int64_t clock = 0; clock < 4; ++clock) {
      table.push_tensors(named_x(at::ones({1})));
      if (rank.where.rank == 1 && clock == 2) {
        server.leave();
        server.leave();
        return error_of([&] { table.pull_tensors(); }).find("has left") != std::string::npos ? -1.0
                                                                                             : 0.0;
      }
      server.clock();
    }
    return table.pull_tensors()["x"].item<double>();
  });
  CHECK(seen == std::vector<double>{3 + 3 + 2 + 2, -1, 10});
}

}  // namespace trireme::bsp_test
