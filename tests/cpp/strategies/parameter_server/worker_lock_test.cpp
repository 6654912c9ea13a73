// Several threads of a worker: nothing they push is lost, a wait lets the others in, and close()
// ends what they wait for.

#include <trireme/strategies/parameter_server/worker_lock.h>

#include <trireme/activation/checkpoint.h>
#include <trireme/strategies/parameter_server/embedding.h>

#include <torch/csrc/autograd/autograd.h>

#include <future>
#include <mutex>
#include <strategies/parameter_server/sparse_rows.h>

namespace trireme::worker_lock_test {

using namespace trireme::test;

namespace {

constexpr int64_t kThreads = 4;
constexpr int64_t kPushes = 25;
constexpr int64_t kIds = 40;

std::vector<ps::TableSpec> counts() {
  return {items(ps::Sum{}, {.reduction = ps::Reduction::kSum}),
          zeros_table("dense", 50'000, ps::Sum{}, {.reduction = ps::Reduction::kSum})};
}

// Adds one to each row and each element in every push, in another order of ids each time.
void push_ones(ps::ParameterServer& server, int64_t thread) {
  for (int64_t push = 0; push < kPushes; ++push) {
    const at::Tensor ids = (at::arange(kIds) * (2 * thread + 3) + push) % kIds;
    server.sparse("items").push(ids.roll(thread), at::ones({kIds, kDim}));
    server.dense("dense").push_tensors(named_x(at::ones({50'000})));
    server.sparse("items").pull(ids);
  }
}

void run_threads(const std::function<void(int64_t)>& run) {
  std::vector<std::future<void>> threads;
  for (int64_t thread = 0; thread < kThreads; ++thread)
    threads.push_back(std::async(std::launch::async, run, thread));
  for (auto& thread : threads) thread.get();
}

}  // namespace

TEST_CASE("threads of a worker: what all of them push is added up") {
  const auto mode = GENERATE(ps::Mode::kBsp, ps::Mode::kSsp, ps::Mode::kAsync);
  const auto right = on_workers<bool>(2, [&](ThreadRank& rank) {
    ps::ParameterServer server(rank.communicator, counts(),
                               {.mode = mode, .staleness = mode == ps::Mode::kSsp ? 1 : 0});
    run_threads([&](int64_t thread) { push_ones(server, thread); });
    server.clock();
    rank.communicator->barrier("all have pushed").wait();
    const at::Tensor rows = server.sparse("items").pull(at::arange(kIds));
    const at::Tensor dense = server.dense("dense").pull_tensors()["x"];
    return (rows == 2 * kThreads * kPushes).all().item<bool>() &&
           (dense == 2 * kThreads * kPushes).all().item<bool>() &&
           server.stats().pushes == 2 * kThreads * kPushes;
  });
  CHECK(right == std::vector<bool>{true, true});
}

// Worker 1 clocks only once it has heard of a push that worker 0 makes while it waits for it.
TEST_CASE("threads of a worker: one that waits lets the others in, and close() ends its wait") {
  std::promise<void> pushed;
  std::promise<void> ended;
  const auto found = on_workers<std::string>(2, [&](ThreadRank& rank) {
    ps::ParameterServer server(rank.communicator, counts());
    ps::SparseTable& table = server.sparse("items");
    const auto push = [&] { table.push(to_ids({3}), at::ones({1, kDim})); };
    const auto pull = [&] { return table.pull(to_ids({3})).mean().item<double>(); };
    push();
    if (rank.where.rank == 1) {
      pushed.get_future().wait();
      server.clock();
      ended.get_future().wait();
      return std::string();
    }
    server.clock();
    auto first = std::async(std::launch::async, pull);
    Pending pending = table.pull_async(to_ids({3}));
    auto second = std::async(std::launch::async, [&] {
      pending.wait();
      return pending.result().at(0).mean().item<double>();
    });
    push();
    pushed.set_value();
    const bool right = first.get() == 2 && second.get() == 2;
    server.clock();
    auto third = std::async(std::launch::async, [&] { return error_of([&] { pull(); }); });
    server.close();
    ended.set_value();
    return (right ? "right; " : "wrong; ") + third.get();
  });
  CHECK_THAT(found[0], Catch::StartsWith("right; ") && Catch::Contains("closed"));
}

TEST_CASE("threads of a worker: a lock counts, and a gap lets it all go") {
  ps::WorkerLock lock;
  const auto take = [&] { const std::unique_lock own(lock); };
  const std::unique_lock first(lock);
  const std::unique_lock second(lock);
  {
    const ps::WorkerLock::Gap gap(lock);
    std::async(std::launch::async, take).get();
  }
  std::future<void> third = std::async(std::launch::async, take);
  CHECK(third.wait_for(std::chrono::milliseconds(1)) == std::future_status::timeout);
  const ps::WorkerLock::Gap gap(lock);
  third.get();
}

// The table moves between the forward and the backward.
TEST_CASE("sparse: a recomputation reads the rows of its forward") {
  const auto right = on_workers<bool>(1, [&](ThreadRank& rank) {
    ps::ParameterServer server(rank.communicator, counts(), {.mode = ps::Mode::kAsync});
    ps::Embedding embedding(server, "items");
    const at::Tensor weight = at::ones({kDim}).requires_grad_();
    const auto layer = [&](const at::Tensor& ids) { return (embedding(ids) * weight).exp(); };
    const at::Tensor ids = to_ids({1, 2, 1});
    const at::Tensor plain = layer(ids).sum();
    const at::Tensor recomputed = checkpoint(layer, ids).sum();
    server.sparse("items").push(ids, at::ones({3, kDim}));
    const at::Tensor expected = torch::autograd::grad({plain}, {weight})[0];
    const at::Tensor found = torch::autograd::grad({recomputed}, {weight})[0];
    return expected.equal(found);
  });
  CHECK(right == std::vector<bool>{true});
}

TEST_CASE("gradients with torch's lazy minus are pushed with their sign") {
  const auto mode = GENERATE(ps::Mode::kBsp, ps::Mode::kAsync);
  const auto right = on_workers<bool>(1, [&](ThreadRank& rank) {
    ps::ParameterServer server(rank.communicator, counts(), {.mode = mode});
    server.sparse("items").push(to_ids({7}), at::_neg_view(at::ones({1, kDim})));
    server.dense("dense").push_tensors(named_x(at::_neg_view(at::ones({50'000}))));
    server.clock();
    return server.sparse("items").pull(to_ids({7})).equal(at::full({1, kDim}, -1.0)) &&
           server.dense("dense").pull_tensors()["x"].equal(at::full({50'000}, -1.0));
  });
  CHECK(right == std::vector<bool>{true});
}

}  // namespace trireme::worker_lock_test
