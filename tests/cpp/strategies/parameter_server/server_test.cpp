// The server itself: who may do what, modules in its memory, views, what returns at once, writing.

#include <trireme/common/interruption.h>

#include <stdexcept>
#include <strategies/parameter_server/ps_ranks.h>
#include <vector>

namespace trireme::ps_server_test {

using namespace trireme::test;
using Texts = std::vector<std::string>;

namespace {

void add_in_place(const at::Tensor& tensor, double value) {
  const at::NoGradGuard no_grad;
  tensor.add_(value);
}

// Is thrown as if a signal handler raised, on the threads that say so.
struct Called final : std::runtime_error, Interruption {
  Called() : std::runtime_error(kText), Interruption(kText) {}
  static constexpr const char* kText = "Called was raised by a signal handler";
};
thread_local bool is_called_away = false;

void look_for_calls() {
  if (is_called_away) throw Called();
}

}  // namespace

TEST_CASE("tables that differ by rank are named on all ranks") {
  const auto said = on_workers<Texts>(3, [](ThreadRank& rank) {
    const bool differs = rank.where.rank == 2;
    const auto make = [&](int64_t numel, ps::Optimizer optimizer, ps::Options options) {
      return error_of([&] {
        ps::ParameterServer server(rank.communicator,
                                   {zeros_table("items", numel, std::move(optimizer))}, options);
      });
    };
    return Texts{make(differs ? 4 : 3, ps::SGD{}, {}),
                 make(3, ps::SGD{.lr = differs ? 0.1 : 0.2}, {}),
                 make(3, ps::SGD{}, {.mode = differs ? ps::Mode::kAsync : ps::Mode::kBsp}),
                 make(3, ps::SGD{}, {.staleness = differs ? -1 : 0}), make(3, ps::SGD{}, {})};
  });
  for (const Texts& texts : said) {
    CHECK_THAT(texts[0],
               Catch::Contains("[ps] got 'x' of table 'items' as float32 [3] on rank 0 and "
                               "'x' of table 'items' as float32 [4] on rank 2"));
    CHECK_THAT(texts[1],
               Catch::Contains("SGD(lr=0.2, momentum=0, weight_decay=0), reduction='mean' "
                               "on rank 0 and table 'items'"));
    CHECK_THAT(texts[2], Catch::Contains("mode='async'"));
    CHECK_THAT(texts[3], Catch::Contains("[ps] got staleness=-1, expected >= 0"));
    CHECK(texts[4] == "no error");
  }
  CHECK_THAT(said[0][3], Catch::Contains(", says rank 2 (rank 0 of 3). "));
}

TEST_CASE("a group without the memory of one host is refused, but for one rank") {
  const auto make = [](ThreadRank& rank) {
    return error_of([&] {
      ps::ParameterServer server(rank.communicator, {zeros_table("t", 1, ps::Sum{})});
      server.dense("t").push_tensors(named_x(at::ones({1})));
      server.clock();
      TORCH_CHECK(server.dense("t").pull_tensors()["x"].item<double>() == 1);
    });
  };
  run_thread_ranks(2, [&](ThreadRank& rank) {
    const std::string said = make(rank);
    TORCH_CHECK(said.find("[ps] got a group whose ranks do not share") != std::string::npos, said);
  });
  std::string alone;
  run_thread_ranks(1, [&](ThreadRank& rank) { alone = make(rank); });
  CHECK(alone == "no error");
}

TEST_CASE(
    "worker 0's values count, and a module lies in the table's memory until the server goes") {
  const auto seen = on_workers<Values>(2, [](ThreadRank& rank) {
    torch::nn::Linear net(3, 2);
    {
      const at::NoGradGuard no_grad;
      net->weight.fill_(static_cast<double>(rank.where.rank + 1));
    }
    Values seen;
    {
      ps::ParameterServer server(rank.communicator, {ps::dense("net", net, ps::SGD{.lr = 1})});
      ps::DenseTable& table = server.dense("net");
      TORCH_CHECK(table.is_bound() && table.is_readable());
      seen.push_back(net->weight.detach().clone());
      table.pull();
      const void* place = net->weight.data_ptr();
      net->weight.mutable_grad() = at::ones({2, 3});
      table.push();
      TORCH_CHECK(!net->weight.grad().defined());
      const auto version = net->weight._version();
      server.clock();
      TORCH_CHECK(!table.is_readable() && net->weight._version() > version);
      table.pull();
      TORCH_CHECK(table.is_readable() && net->weight.data_ptr() == place);
      TORCH_CHECK(server.stats().bytes_pulled == 0);
    }
    add_in_place(net->weight, static_cast<double>(rank.where.rank));  // private again
    seen.push_back(net->weight.detach().clone());
    return seen;
  });
  CHECK(at::equal(seen[0][0], at::ones({2, 3})));
  CHECK(at::equal(seen[1][0], at::ones({2, 3})));
  CHECK(at::equal(seen[0][1], at::zeros({2, 3})));
  CHECK(at::equal(seen[1][1], at::ones({2, 3})));
}

TEST_CASE("a graph that was kept over a clock raises, as torch's own") {
  const auto said = on_workers<std::string>(2, [](ThreadRank& rank) {
    torch::nn::Sequential net = two_layers();
    ps::ParameterServer server(rank.communicator, {ps::dense("net", net, ps::SGD{})});
    ps::DenseTable& table = server.dense("net");
    table.pull();
    const at::Tensor loss = net->forward(at::ones({2, 300})).sum();
    server.clock();
    table.pull();
    return error_of([&] { loss.backward(); });
  });
  for (const std::string& text : said)
    CHECK_THAT(text, Catch::Contains("modified by an inplace operation"));
}

TEST_CASE("a parameter that was written in place is told once; inside writing() it may be") {
  const auto said = on_workers<Texts>(2, [](ThreadRank& rank) {
    torch::nn::Sequential net = two_layers();
    ps::ParameterServer server(rank.communicator, {ps::dense("net", net, ps::SGD{})});
    ps::DenseTable& table = server.dense("net");
    table.pull();
    Texts texts;
    const at::Tensor bias = net->parameters()[3];
    rank.communicator->barrier("pulled").wait();
    if (rank.where.rank == 0) {
      add_in_place(bias, 1);
      texts.push_back(error_of([&] { server.clock(); }));
    }
    server.clock();
    table.pull();
    {
      const auto writing = table.writing();
      add_in_place(bias, static_cast<double>(rank.where.rank + 10) - bias[0].item<double>());
    }
    texts.push_back(std::to_string(static_cast<int>(bias[0].item<double>())));
    texts.push_back(error_of([&] {
      const auto writing = table.writing();
      add_in_place(bias, 1);
      TORCH_CHECK(rank.where.rank == 0, "no values on this rank");
    }));
    texts.push_back(std::to_string(static_cast<int>(bias[0].item<double>())));
    server.clock();
    table.pull();
    return texts;
  });
  CHECK_THAT(said[0][0], Catch::Contains("[ps] clock: parameter '2.bias' of table 'net' was "
                                         "changed in place"));
  CHECK(said[0][1] == "10");
  CHECK(said[1][0] == "10");
  CHECK_THAT(said[0][2], Catch::Contains("worker 1 (rank 1, process "));
  CHECK_THAT(said[0][2], Catch::Contains("has left it by an exception"));
  CHECK_THAT(said[1][1], Catch::Contains("no values on this rank"));
  CHECK(said[0][3] == "10");
  CHECK(said[1][2] == "10");
}

TEST_CASE("all name the worker that has failed in writing(), which is not held twice") {
  const auto said = on_workers<Texts>(3, [](ThreadRank& rank) {
    torch::nn::Sequential net = two_layers();
    ps::ParameterServer server(rank.communicator, {ps::dense("net", net, ps::SGD{})});
    ps::DenseTable& table = server.dense("net");
    table.pull();
    const at::Tensor bias = net->parameters()[3];
    Texts texts;
    for (const bool is_right : {false, true}) {
      texts.push_back(error_of([&] {
        const auto writing = table.writing();
        add_in_place(bias, 10 - bias[0].item<double>());
        if (rank.where.rank == 2 && !is_right) const auto again = table.writing();
      }));
      texts.push_back(is_right == (bias[0].item<double>() == 10) ? "as it should be" : "not so");
    }
    return texts;
  });
  for (const size_t rank : {0, 1}) {
    CHECK_THAT(said[rank][0], Catch::Contains("worker 2 (rank 2, process "));
    CHECK_THAT(said[rank][0], !Catch::Contains("DistBackendError"));
  }
  CHECK_THAT(said[2][0], Catch::Contains("writing: got a call inside of writing() of table 'net'"));
  for (const Texts& texts : said)
    CHECK(Texts(texts.begin() + 1, texts.end()) ==
          Texts{"as it should be", "no error", "as it should be"});
}

TEST_CASE("a worker that was called away from writing() comes again, with one that had not come") {
  set_interruption_check(&look_for_calls);
  const auto said = on_workers<Texts>(2, [](ThreadRank& rank) {
    torch::nn::Sequential net = two_layers();
    ps::ParameterServer server(rank.communicator, {ps::dense("net", net, ps::SGD{})});
    ps::DenseTable& table = server.dense("net");
    table.pull();
    Texts texts{"no error"};
    if (rank.where.rank == 0) {
      is_called_away = true;
      try {
        table.begin_writing();
      } catch (const Called& called) {
        texts[0] = called.reason;
      }
      is_called_away = false;
    }
    rank.communicator->barrier("called away").wait();
    const at::Tensor bias = net->parameters()[3];
    {
      const auto writing = table.writing();
      add_in_place(bias, static_cast<double>(rank.where.rank + 10) - bias[0].item<double>());
    }
    texts.push_back(std::to_string(static_cast<int>(bias[0].item<double>())));
    return texts;
  });
  CHECK_THAT(said[0][0], Catch::Contains("Called was raised by a signal handler"));
  CHECK(said[0][1] == "10");
  CHECK(said[1] == Texts{"no error", "10"});
}

TEST_CASE("views show the table's memory; copies do not") {
  on_workers<int>(2, [](ThreadRank& rank) {
    ps::ParameterServer server(rank.communicator, {zeros_table("t", 3, ps::Sum{})},
                               {.mode = ps::Mode::kAsync});
    ps::DenseTable& table = server.dense("t");
    const at::Tensor view = table.pull_tensors(/*view=*/true)["x"];
    const at::Tensor copy = table.pull_tensors()["x"];
    rank.communicator->barrier("pulled").wait();
    table.push_tensors(named_x(at::ones({3})));
    rank.communicator->barrier("pushed").wait();
    TORCH_CHECK(at::equal(view, at::full({3}, 2.0)) && at::equal(copy, at::zeros({3})));
    return 0;
  });
  const auto said = on_workers<std::string>(2, [](ThreadRank& rank) {
    ps::ParameterServer server(rank.communicator, {zeros_table("t", 3, ps::Sum{})}, {.backup = 1});
    return error_of([&] { server.dense("t").pull_tensors(/*view=*/true); });
  });
  CHECK_THAT(said[0], Catch::Contains("[ps] pull: got a view with backup workers"));
}

TEST_CASE("what is asked for at once waits in wait(), and not after another clock") {
  const auto said = on_workers<std::string>(2, [](ThreadRank& rank) {
    ps::ParameterServer server(rank.communicator, {zeros_table("t", 1, ps::Sum{})});
    ps::DenseTable& table = server.dense("t");
    if (rank.where.rank == 1) {
      rank.communicator->barrier("asked").wait();
      for (int64_t clock = 0; clock < 3; ++clock) {
        table.push_tensors_async(named_x(at::ones({1}))).wait();
        server.clock();
      }
      rank.communicator->barrier("late").wait();
      return std::string();
    }
    for (int64_t clock = 0; clock < 2; ++clock) {
      table.push_tensors_async(named_x(at::ones({1}))).wait();
      server.clock();
    }
    Pending push = table.push_tensors_async(named_x(at::ones({1})));
    Pending pull = table.pull_tensors_async();
    TORCH_CHECK(!push.done() && !pull.done());
    rank.communicator->barrier("asked").wait();
    push.wait();
    pull.wait();
    TORCH_CHECK(push.done() && pull.result()[0].item<double>() == 2);
    server.clock();
    TORCH_CHECK(table.pull_tensors()["x"].item<double>() == 3);
    server.clock();
    Pending late = table.pull_tensors_async();
    server.clock();
    const std::string said = error_of([&] { late.wait(); });
    rank.communicator->barrier("late").wait();
    return said;
  });
  CHECK_THAT(said[0], Catch::Contains("[ps] wait() for a pull of table 't': got it at clock 5, "
                                      "expected it at clock 4"));
}

TEST_CASE("ranks that only serve watch until all workers have left") {
  const auto said = on_workers<Texts>(3, [](ThreadRank& rank) {
    ps::ParameterServer server(rank.communicator, {zeros_table("t", 1, ps::Sum{})},
                               {.servers = {1}});
    if (rank.where.rank < 2) {
      server.dense("t").push_tensors(named_x(at::ones({1})));
      server.clock();
      const auto sum = server.dense("t").pull_tensors()["x"].item<int64_t>();
      return Texts{std::to_string(*server.worker()), std::to_string(sum),
                   error_of([&] { server.serve(); })};
    }
    TORCH_CHECK(!server.worker() && server.workers() == 2);
    const Texts texts{error_of([&] { server.dense("t").pull_tensors(); }),
                      error_of([&] { server.clock(); })};
    server.serve();
    TORCH_CHECK(server.stats().left.size() == 2);
    return texts;
  });
  CHECK(said[0][0] == "0");
  CHECK(said[1][0] == "1");
  CHECK(said[0][1] == "1");
  CHECK_THAT(said[0][2], Catch::Contains("[ps] serve: got a rank that works"));
  CHECK_THAT(said[2][0], Catch::Contains("[ps] pull: got a rank that serves"));
  CHECK_THAT(said[2][1], Catch::Contains("[ps] clock: got a rank that serves"));
}

TEST_CASE("what cannot be pushed is refused, and nothing was pushed") {
  const auto done = on_workers<int>(1, [](ThreadRank& rank) {
    torch::nn::Linear net(2, 2);
    ps::ParameterServer server(rank.communicator,
                               {zeros_table("t", 3, ps::Sum{}), ps::dense("net", net, ps::SGD{})});
    ps::DenseTable& table = server.dense("t");
    const auto refused = [&](const at::Tensor& gradient, const std::string& text) {
      const std::string said = error_of([&] { table.push_tensors(named_x(gradient)); });
      TORCH_CHECK(said.find(text) != std::string::npos, said);
    };
    refused(at::ones({4}),
            "[ps] push: got a gradient of shape [4] for 'x' of table 't', expected "
            "float32 [3]");
    refused(at::ones({3}, at::kDouble), "got a gradient of dtype float64 for 'x'");
    refused(at::ones({3}).to_sparse(), "got a gradient of layout Sparse for 'x'");
    ps::NamedTensors unknown;
    unknown.insert("y", at::ones({3}));
    const auto said = [](const std::function<void()>& call) { return error_of(call); };
    TORCH_CHECK(said([&] { table.push_tensors(unknown); }).find("got a gradient of 'y'") !=
                std::string::npos);
    TORCH_CHECK(said([&] { table.push(); }).find("got table 't' made of tensors") !=
                std::string::npos);
    TORCH_CHECK(said([&] { table.set_lr(0.1); }).find("set_lr: got 0.1 for table 't'") !=
                std::string::npos);
    TORCH_CHECK(said([&] {
                  server.dense("z");
                }).find("got table 'z', expected one of 't', 'net'") != std::string::npos);
    server.clock();
    TORCH_CHECK(at::equal(table.pull_tensors()["x"], at::zeros({3})));
    server.close();
    server.close();
    TORCH_CHECK(said([&] { server.clock(); }).find("[ps] clock: got a server that is closed") !=
                std::string::npos);
    return 1;
  });
  CHECK(done[0] == 1);
}

TEST_CASE("a worker that an exception ends is named, or left behind") {
  for (const ps::WorkerLoss loss : {ps::WorkerLoss::kRaise, ps::WorkerLoss::kContinue}) {
    for (const ps::Mode mode : {ps::Mode::kBsp, ps::Mode::kSsp}) {
      const auto said = on_workers<std::string>(2, [&](ThreadRank& rank) {
        return error_of([&] {
          ps::ParameterServer server(rank.communicator, {zeros_table("t", 1, ps::Sum{})},
                                     {.mode = mode, .on_worker_loss = loss});
          ps::DenseTable& table = server.dense("t");
          for (int64_t clock = 0; clock < 5; ++clock) {
            table.pull_tensors();
            table.push_tensors(named_x(at::ones({1})));
            TORCH_CHECK(rank.where.rank == 0 || clock < 3, "the data are broken");
            server.clock();
          }
          table.pull_tensors();
        });
      });
      CHECK_THAT(said[1], Catch::Contains("the data are broken"));
      if (loss == ps::WorkerLoss::kContinue) {
        CHECK(said[0] == "no error");
      } else {
        CHECK_THAT(said[0], Catch::Contains("[ps] pull of table 't' at clock "));
        CHECK_THAT(said[0], Catch::Contains("worker 1 (rank 1, process "));
        CHECK_THAT(said[0], Catch::Contains("has left at clock 3, ended by an exception"));
      }
    }
  }
}

TEST_CASE("what a signal handler raises comes out of close() once all is closed") {
  set_interruption_check(&look_for_calls);
  const auto left = on_workers<std::vector<int64_t>>(2, [](ThreadRank& rank) {
    torch::nn::Sequential net = two_layers();
    ps::ParameterServer server(rank.communicator, {ps::dense("net", net, ps::SGD{})});
    ps::DenseTable& table = server.dense("net");
    const auto meet = [&](const char* what) { rank.communicator->barrier(what).wait(); };
    if (rank.where.rank == 0) {
      server.clock();
      meet("clocked");
      const void* place = net->parameters()[0].data_ptr();
      is_called_away = true;
      bool is_told = false;
      try {
        server.close();
      } catch (const Called&) {
        is_told = true;
      }
      is_called_away = false;
      TORCH_CHECK(is_told && net->parameters()[0].data_ptr() != place);
      TORCH_CHECK(error_of([&] { server.clock(); }).find("is closed") != std::string::npos);
      meet("closed");
      return std::vector<int64_t>();
    }
    // It holds a block by hand, for which the other one waits in close().
    std::atomic<uint64_t>& holder = table.steps().memory().block(0).holder;
    holder.store(static_cast<uint64_t>(*server.worker()) + 1);
    server.clock();
    meet("clocked");
    meet("closed");
    holder.store(0);
    return server.stats().left;
  });
  CHECK(left[1] == std::vector<int64_t>{0});
}

TEST_CASE("a wait ends at its deadline, and names who is behind") {
  const auto said = on_workers<std::string>(3, [](ThreadRank& rank) {
    ps::ParameterServer server(rank.communicator, {zeros_table("t", 1, ps::Sum{})},
                               {.timeout = std::chrono::milliseconds(100)});
    const bool is_behind = rank.where.rank == 1;
    if (!is_behind) server.clock();
    rank.communicator->barrier("clocked").wait();
    const std::string said =
        is_behind ? std::string() : error_of([&] { server.dense("t").pull_tensors(); });
    rank.communicator->barrier("waited").wait();
    return said;
  });
  for (const size_t rank : {0, 2}) {
    CHECK_THAT(said[rank],
               Catch::Contains("[ps] pull of table 't' at clock 1: worker 1 (rank 1, "));
    CHECK_THAT(said[rank], Catch::Contains("has not come within 100 ms; it is alive, at clock 0"));
  }
}

}  // namespace trireme::ps_server_test
