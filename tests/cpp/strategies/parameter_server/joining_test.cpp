// Workers that join while others push and clock, from threads without a group; and what they read
// of a server in the Store.

#include <trireme/strategies/parameter_server/server_invitation.h>

#include <atomic>
#include <strategies/parameter_server/ps_ranks.h>
#include <thread>
#include <vector>

namespace trireme::ps_joining_test {

using namespace trireme::test;

namespace {

constexpr int64_t kNumel = 70'000;  // three blocks

std::vector<ps::TableSpec> tables() {
  return {zeros_table("x", kNumel, ps::Sum{}, {.reduction = ps::Reduction::kSum}),
          ps::sparse("rows", 5, ps::Sum{}, {.reduction = ps::Reduction::kSum})};
}

// Pushes a one to each element, and to two rows, and ends the clock.
void push_ones(ps::ParameterServer& server) {
  server.dense("x").push_tensors(named_x(at::ones({kNumel})));
  server.sparse("rows").push(at::tensor({int64_t{1}, *server.worker() + 2}), at::ones({2, 5}));
  server.clock();
  server.dense("x").pull_tensors(/*view=*/true);
}

// Joins some milliseconds after the others, and takes part in as many clocks.
std::thread join_later(const c10::intrusive_ptr<c10d::Store>& store, int64_t number,
                       std::atomic<int64_t>& left, std::string& error) {
  return std::thread([&store, &left, &error, number] {
    error = error_of([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(3 * number));
      const auto server = ps::ParameterServer::join(store);
      for (int64_t clock = 0; clock < number; ++clock) push_ones(*server);
      server->leave();
    });
    ++left;
  });
}

// Returns what the first element and row hold, and checks that all elements hold it.
std::vector<double> values_of(ps::ParameterServer& server) {
  server.clock();  // under bsp, what was pushed before is in it
  const at::Tensor x = server.dense("x").pull_tensors()["x"];
  TORCH_CHECK(at::equal(x, at::full({kNumel}, x[0].item<double>())));
  const at::Tensor row = server.sparse("rows").pull(at::tensor({int64_t{1}}));
  return {x[0].item<double>(), row[0][0].item<double>()};
}

}  // namespace

TEST_CASE("what workers push is counted once, whenever they join and leave") {
  constexpr int64_t kJoined = 6;
  for (const ps::Mode mode : {ps::Mode::kBsp, ps::Mode::kSsp, ps::Mode::kAsync}) {
    std::atomic<int64_t> left{0};
    std::atomic<int64_t> pushes{kJoined * (kJoined + 1) / 2};
    std::vector<std::string> errors(kJoined);
    const auto seen = on_workers<std::vector<double>>(2, [&](ThreadRank& rank) {
      ps::ParameterServer server(rank.communicator, tables(), {.mode = mode});
      std::vector<std::thread> threads;
      if (rank.where.rank == 0) {
        server.accept(rank.store);
        for (int64_t i = 0; i < kJoined; ++i)
          threads.push_back(join_later(rank.store, i + 1, left, errors[static_cast<size_t>(i)]));
      }
      for (; left < kJoined; ++pushes) push_ones(server);
      server.leave();
      for (std::thread& thread : threads) thread.join();
      rank.communicator->barrier("all have left").wait();
      if (rank.where.rank == 1) return std::vector<double>();
      const auto last = ps::ParameterServer::join(rank.store);
      TORCH_CHECK(last->worker() == 2 + kJoined);
      return values_of(*last);
    });
    for (const std::string& error : errors) CHECK(error == "no error");
    CHECK(seen[0] == std::vector<double>(2, static_cast<double>(pushes)));
  }
}

TEST_CASE("no more than 64 workers join, and with backup as many as a word has bits for") {
  for (const int64_t backup : {0, 1}) {
    const auto seen = on_workers<std::string>(2, [&](ThreadRank& rank) {
      ps::ParameterServer server(rank.communicator, tables(), {.backup = backup});
      if (rank.where.rank == 1) return std::string();
      server.accept(rank.store);
      const int64_t most = backup == 0 ? 66 : ps::kMostWithBackup;
      for (int64_t worker = 2; worker < most; ++worker) {
        const auto joined = ps::ParameterServer::join(rank.store);
        TORCH_CHECK(joined->worker() == worker);
      }
      return error_of([&] { ps::ParameterServer::join(rank.store); });
    });
    CHECK_THAT(seen[0], Catch::Contains("[ps] join: got " + std::to_string(backup == 0 ? 66 : 48) +
                                        " workers so far, expected fewer"));
  }
}

TEST_CASE("an invitation is read as it was written") {
  ps::NamedTensors tensors;
  tensors.insert("a", at::zeros({3, 2}, at::kBFloat16));
  tensors.insert("b", at::zeros({}, at::kDouble));
  std::vector<ps::TableSpec> tables;
  tables.push_back(ps::dense("net", tensors, ps::AdamW{.lr = 0.1, .beta1 = 1.0 / 3},
                             {.reduction = ps::Reduction::kSum}));
  tables.push_back(ps::sparse("rows", 7, ps::RowwiseAdagrad{.lr = 0.3},
                              {.init = ps::Normal{0.1},
                               .seed = UINT64_MAX,
                               .dtype = at::kHalf,
                               .rows = 100,
                               .staleness = 3}));
  tables.push_back(ps::sparse("more", 1, ps::Sum{}, {.init = ps::Uniform{2}}));
  const ps::Options options{.mode = ps::Mode::kSsp,
                            .staleness = 4,
                            .timeout = std::chrono::milliseconds(1500),
                            .on_worker_loss = ps::WorkerLoss::kContinue};
  const ps::ServerPlan plan(tables, options, {2, 66, 1}, int64_t{1} << 30);
  const ps::Invitation read = ps::invitation_of(ps::to_text({plan, {"here", "there"}}));
  CHECK(read.addresses == std::vector<std::string>{"here", "there"});
  CHECK(read.plan.bytes == plan.bytes);
  CHECK(to_string(read.plan.options, {}) == to_string(options, {}));
  CHECK(read.plan.options.timeout == options.timeout);
  REQUIRE(read.plan.specs.size() == 3);
  for (size_t i = 0; i < 3; ++i) CHECK(to_string(*read.plan.specs[i]) == to_string(tables[i]));
}

TEST_CASE("a text that no server of this build on this host has written is refused") {
  const ps::ServerPlan plan({zeros_table("x", 1, ps::Sum{})}, {}, {1, 65, 0}, 1 << 20);
  const std::string good = ps::to_text({plan, {"here"}});
  for (const char* word : {"\"host\":\"", "\"layout\":\"", "\"tables\":[{", "\"optimizer\":[\""}) {
    std::string bad = good;
    const size_t found = bad.find(word);
    REQUIRE(found != std::string::npos);
    bad.insert(found + std::string(word).size() - (word[1] == 't' ? 2 : 0), "x");
    CHECK_THAT(error_of([&] { ps::invitation_of(bad); }), Catch::Contains("[ps] join: got "));
  }
  for (size_t length = 0; length < good.size(); length += 7)
    CHECK_THAT(error_of([&] { ps::invitation_of(good.substr(0, length)); }),
               Catch::Contains("[ps] join: got a text that no server has left"));
}

}  // namespace trireme::ps_joining_test
