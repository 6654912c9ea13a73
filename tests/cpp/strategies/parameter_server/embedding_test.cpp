// Modules over sparse tables, what sparse tables refuse, and what returns at once.

#include <trireme/strategies/parameter_server/embedding.h>

#include <trireme/common/interruption.h>

#include <functional>
#include <future>
#include <optional>
#include <strategies/parameter_server/sparse_rows.h>
#include <utility>

namespace trireme::embedding_test {

using namespace trireme::test;

TEST_CASE("sparse: Embedding and EmbeddingBag train as torch's do") {
  const auto all_ids = [](int64_t step) { return at::arange(24).view({8, 3}) * (step + 1) % 19; };
  torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(19, kDim));
  torch::nn::EmbeddingBag bag(torch::nn::EmbeddingBagOptions(19, kDim).mode(torch::kMean));
  for (auto* weight : {&embedding->weight, &bag->weight}) {
    const torch::NoGradGuard no_grad;
    for (int64_t id = 0; id < 19; ++id)
      (*weight)[id].copy_(first_values({.init = ps::Normal{1}}, id));
  }
  torch::optim::SGD optimizer({embedding->weight, bag->weight}, torch::optim::SGDOptions(0.1));
  const at::Tensor to = at::ones({8, 3, kDim});
  for (int64_t step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    const at::Tensor ids = all_ids(step);
    ((embedding(ids) - to).square().mean() + (bag(ids) - 1).square().mean()).backward();
    optimizer.step();
  }
  const auto found = on_workers<std::vector<at::Tensor>>(2, [&](ThreadRank& rank) {
    const ps::SparseOptions options = {.init = ps::Normal{1}};
    ps::ParameterServer server(rank.communicator,
                               {ps::sparse("embedding", kDim, ps::SGD{.lr = 0.1}, options),
                                ps::sparse("bag", kDim, ps::SGD{.lr = 0.1}, options)});
    ps::Embedding ours(server, "embedding");
    ps::EmbeddingBag our_bag(server, "bag");
    for (int64_t step = 0; step < 5; ++step) {
      const at::Tensor ids = all_ids(step).chunk(2)[rank.where.rank];
      ((ours(ids) - to.chunk(2)[rank.where.rank]).square().mean() +
       (our_bag(ids) - 1).square().mean())
          .backward();
      server.clock();
    }
    ours->eval();
    const int64_t before = server.sparse("embedding").size();
    const at::Tensor unseen = ours(at::tensor(Ids{1000}));
    const int64_t made = server.sparse("embedding").size() - before;
    return std::vector<at::Tensor>{server.sparse("embedding").pull(at::arange(19)),
                                   server.sparse("bag").pull(at::arange(19)), unseen[0],
                                   at::scalar_tensor(made)};
  });
  CHECK(at::allclose(found[0][0], embedding->weight, 1e-5, 1e-6));
  CHECK(at::allclose(found[0][1], bag->weight, 1e-5, 1e-6));
  CHECK(found[0][2].equal(first_values({.init = ps::Normal{1}}, 1000)));
  CHECK(found[0][3].item<int64_t>() == 0);
}

// --- what is refused -----------------------------------------------------------------------------

namespace {

using Texts = std::vector<std::string>;

void check_texts(const std::vector<Texts>& by_rank, const Texts& expected) {
  for (const Texts& texts : by_rank) {
    REQUIRE(texts.size() == expected.size());
    for (size_t i = 0; i < texts.size(); ++i) CHECK_THAT(texts[i], Catch::Contains(expected[i]));
  }
}

}  // namespace

TEST_CASE("sparse: bad input is refused by name, and changes nothing") {
  const auto texts = on_workers<Texts>(2, [&](ThreadRank& rank) {
    ps::ParameterServer server(rank.communicator, {items(ps::SGD{}, {.rows = 10})});
    ps::SparseTable& table = server.sparse("items");
    Texts found = {
        error_of<c10::ValueError>([&] { table.pull(at::tensor(Ids{3, 10})); }),
        error_of<c10::ValueError>([&] { table.pull(at::tensor(Ids{-1})); }),
        error_of<c10::TypeError>([&] { table.pull(at::zeros({2})); }),
        error_of<c10::ValueError>([&] { table.push(at::tensor(Ids{3}), at::zeros({2, kDim})); }),
        error_of<c10::ValueError>(
            [&] { table.push(at::tensor(Ids{3}), at::zeros({1, kDim}, at::kHalf)); }),
        error_of<c10::IndexError>([&] { server.dense("items"); }),
        error_of<c10::IndexError>([&] { server.sparse("other"); }),
        std::to_string(table.size())};
    server.close();
    found.push_back(error_of([&] { table.pull(at::tensor(Ids{3})); }));
    return found;
  });
  check_texts(texts,
              {"got id 10", "ids in [0, 10)", "ids of float32", "expected float32 [1, 5]",
               "dtype float16", "expected a dense one", "expected one of 'items'", "0", "closed"});
  const auto refused = [&](const ps::TableSpec& table, const char* text) {
    check_texts(on_workers<Texts>(2,
                                  [&](ThreadRank& rank) {
                                    return Texts{error_of<c10::ValueError>(
                                        [&] { ps::ParameterServer(rank.communicator, {table}); })};
                                  }),
                {text});
  };
  refused(ps::sparse("t", 0, ps::SGD{}), "dim=0");
  refused(ps::sparse("t", 1, ps::SGD{}, {.init = ps::Normal{-1}}), "Normal(std=-1)");
  refused(ps::sparse("t", 1, ps::SGD{}, {.dtype = at::kLong}), "dtype int64");
  refused(ps::sparse("t", 1, ps::SGD{}, {.rows = 0}), "rows=0");
  refused(zeros_table("t", 3, ps::RowwiseAdagrad{}), "without rows");
  check_texts(on_workers<Texts>(2,
                                [&](ThreadRank& rank) {
                                  const auto seed = static_cast<uint64_t>(rank.where.rank);
                                  return Texts{error_of<c10::ValueError>([&] {
                                    ps::ParameterServer(rank.communicator,
                                                        {items(ps::SGD{}, {.seed = seed})});
                                  })};
                                }),
              {"seed=1"});
}

TEST_CASE("sparse: a table outlives its server, and is closed then") {
  on_workers<int>(1, [&](ThreadRank& rank) {
    auto server = std::make_unique<ps::ParameterServer>(
        rank.communicator, std::vector<ps::TableSpec>{items(ps::SGD{})});
    ps::Embedding embedding(*server, "items");
    const at::Tensor rows = embedding(at::tensor(Ids{1}));
    server.reset();
    CHECK_THROWS_WITH(rows.sum().backward(), Catch::Contains("closed"));
    CHECK_THROWS_WITH(embedding(at::tensor(Ids{1})), Catch::Contains("closed"));
    return 0;
  });
}

TEST_CASE("sparse: pushes and pulls that return at once are done in wait() or before the clock") {
  const auto seen = on_workers<std::vector<float>>(2, [&](ThreadRank& rank) {
    ps::ParameterServer server(rank.communicator,
                               {items(ps::Sum{}, {.reduction = ps::Reduction::kSum})});
    std::vector<float> found;
    ps::SparseTable& table = server.sparse("items");
    at::Tensor id = at::tensor(Ids{5});
    for (int64_t clock = 0; clock < 6; ++clock) {
      Pending pull = table.pull_async(id);
      pull.wait();
      found.push_back(pull.result()[0][0][kDim - 1].item<float>());
      at::Tensor gradients = at::ones({1, kDim});
      Pending push = table.push_async(id, gradients);
      gradients.zero_();  // what was handed in was taken
      server.clock();
    }
    return found;
  });
  for (const std::vector<float>& values : seen)
    CHECK(values == std::vector<float>{0, 2, 4, 6, 8, 10});
}

TEST_CASE("sparse: a push that is kept and fails is done again, and counted once") {
  struct Seen {
    std::string said;
    int64_t pushes = 0;
    at::Tensor row;
  };
  const auto seen = on_workers<Seen>(2, [](ThreadRank& rank) {
    ps::ParameterServer server(rank.communicator,
                               {items(ps::Sum{}, {.reduction = ps::Reduction::kSum})},
                               {.timeout = std::chrono::milliseconds(300)});
    ps::SparseTable& table = server.sparse("items");
    const at::Tensor id = at::tensor(Ids{5});
    const auto meet = [&](const char* what) { rank.communicator->barrier(what).wait(); };
    Seen seen;
    if (rank.where.rank == 0) {
      server.clock();
      server.clock();
      Pending push = table.push_async(id, at::ones({1, kDim}));
      TORCH_CHECK(!push.done());
      meet("kept");
      meet("the index is held");
      seen.said = error_of([&] { push.wait(); });
      TORCH_CHECK(server.stats().pushes == 1);
      meet("it has failed");
      meet("the index is free");
      push.wait();
      server.clock();
      seen.pushes = server.stats().pushes;
    } else {
      // It holds the index by hand, so that no row can be made.
      std::atomic<uint64_t>& holder = table.steps().memory().block(ps::SparseSteps::kShares).holder;
      meet("kept");
      server.clock();
      holder.store(static_cast<uint64_t>(*server.worker()) + 1);
      meet("the index is held");
      meet("it has failed");
      holder.store(0);
      meet("the index is free");
      server.clock();
      server.clock();
    }
    meet("all have clocked");
    seen.row = table.pull(id);
    return seen;
  });
  CHECK_THAT(seen[0].said, Catch::Contains("[ps] push of table 'items' at clock 2, at the index"));
  CHECK(seen[0].pushes == 1);
  for (const Seen& look : seen) CHECK(look.row.equal(at::ones({1, kDim})));
}

namespace {

// Called once by the next wait of this thread that lets others in.
thread_local std::function<void()> meanwhile;

void look_around() {
  if (meanwhile) std::exchange(meanwhile, nullptr)();
}

}  // namespace

TEST_CASE("sparse: what a thread pushes while another one's clock() waits belongs to that clock") {
  set_interruption_check(&look_around);
  const auto seen = on_workers<std::vector<at::Tensor>>(2, [](ThreadRank& rank) {
    const auto sums = [](const char* name) {
      return ps::sparse(name, kDim, ps::Sum{}, {.reduction = ps::Reduction::kSum});
    };
    ps::ParameterServer server(rank.communicator, {sums("first"), sums("second")});
    const at::Tensor id = at::tensor(Ids{5});
    const at::Tensor one = at::ones({1, kDim});
    const auto meet = [&](const char* what) { rank.communicator->barrier(what).wait(); };
    if (rank.where.rank == 0) {
      server.clock();
      server.clock();
      Pending second = server.sparse("second").push_async(id, one);
      std::optional<Pending> first;
      TORCH_CHECK(!second.done());
      meanwhile = [&] {
        const auto push = [&] { first = server.sparse("first").push_async(id, one); };
        std::async(std::launch::async, push).get();
        TORCH_CHECK(!first->done());
        meet("both are kept");
      };
      server.clock();
      first->wait();
      second.wait();
    } else {
      meet("both are kept");
      for (int64_t clock = 0; clock < 3; ++clock) server.clock();
    }
    return std::vector{server.sparse("first").pull(id), server.sparse("second").pull(id)};
  });
  for (const std::vector<at::Tensor>& rows : seen)
    for (const at::Tensor& row : rows) CHECK(row.equal(at::ones({1, kDim})));
}

}  // namespace trireme::embedding_test
