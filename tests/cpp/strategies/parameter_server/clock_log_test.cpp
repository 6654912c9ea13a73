// mode ssp and async: what pulls have seen, held against the rules.

#include <algorithm>
#include <atomic>
#include <random>
#include <strategies/parameter_server/ps_ranks.h>
#include <thread>
#include <vector>

namespace trireme::clock_log_test {

using namespace trireme::test;

namespace {

// A pull at `clock`: how many pushes of each worker it saw, one per clock.
struct Seen {
  int64_t clock;
  std::vector<int64_t> pushes;
};
using Log = std::vector<Seen>;

// Each worker counts its pushes in an element of its own.
Seen look(ps::DenseTable& table, int64_t clock) {
  const at::Tensor counts = table.pull_tensors()["x"].to(at::kLong).contiguous();
  return {clock, {counts.data_ptr<int64_t>(), counts.data_ptr<int64_t>() + counts.numel()}};
}

Log run_worker(ThreadRank& rank, const ps::Options& options, int64_t clocks, uint32_t seed) {
  const int64_t workers = rank.where.world;
  ps::ParameterServer server(rank.communicator, {zeros_table("t", workers, ps::Sum{})}, options);
  ps::DenseTable& table = server.dense("t");
  std::mt19937 drawn(seed + static_cast<uint32_t>(rank.where.rank));
  at::Tensor own = at::zeros({workers});
  own[rank.where.rank] = 1;
  Log log;
  for (int64_t clock = 0; clock < clocks; ++clock) {
    for (uint32_t i = drawn() % 20; i > 0; --i) std::this_thread::yield();
    if (drawn() % 4 != 0) log.push_back(look(table, clock));
    table.push_tensors(named_x(own));
    if (drawn() % 2 != 0) {
      log.push_back(look(table, clock));
      log.back().pushes[static_cast<size_t>(rank.where.rank)] -= 1;  // its own of this clock
    }
    server.clock();
  }
  return log;
}

void check_log(const Log& log, int64_t worker, int64_t staleness) {
  std::vector<int64_t> before(log.empty() ? 0 : log[0].pushes.size(), 0);
  for (const Seen& look : log) {
    const auto own = static_cast<size_t>(worker);
    CHECK(look.pushes[own] == look.clock);
    for (size_t v = 0; v < look.pushes.size(); ++v) {
      CHECK(look.pushes[v] >= look.clock - staleness);
      CHECK(look.pushes[v] >= before[v]);
    }
    before = look.pushes;
  }
}

}  // namespace

TEST_CASE("ssp: pulls see what the rules say, under random delays") {
  for (const int64_t workers : {2, 3, 4}) {
    for (const int64_t staleness : {0, 1, 2, 5}) {
      CAPTURE(workers, staleness);
      const auto logs = on_workers<Log>(workers, [&](ThreadRank& rank) {
        return run_worker(rank, {.mode = ps::Mode::kSsp, .staleness = staleness}, 60,
                          static_cast<uint32_t>(10 * workers + staleness));
      });
      for (int64_t worker = 0; worker < workers; ++worker)
        check_log(logs[static_cast<size_t>(worker)], worker, staleness);
    }
  }
}

TEST_CASE("async: a pull sees one's own pushes and never falls back") {
  const auto logs = on_workers<Log>(
      3, [&](ThreadRank& rank) { return run_worker(rank, {.mode = ps::Mode::kAsync}, 60, 3); });
  for (int64_t worker = 0; worker < 3; ++worker)
    check_log(logs[static_cast<size_t>(worker)], worker, /*staleness=*/60);
}

TEST_CASE("ssp: a worker comes exactly as far ahead of a slow one as is allowed") {
  for (const int64_t staleness : {0, 1, 2, 5}) {
    CAPTURE(staleness);
    std::atomic<int64_t> fast{0};
    std::atomic<int64_t> most{0};
    on_workers<int>(2, [&](ThreadRank& rank) {
      ps::ParameterServer server(rank.communicator, {zeros_table("t", 1, ps::Sum{})},
                                 {.mode = ps::Mode::kSsp, .staleness = staleness});
      ps::DenseTable& table = server.dense("t");
      for (int64_t clock = 0; clock < 8; ++clock) {
        if (rank.where.rank == 1) {
          // It is as slow as can be: it goes on once the other one can no more.
          const int64_t furthest = std::min<int64_t>(clock + staleness, 7);
          while (fast < furthest) std::this_thread::yield();
        }
        table.pull_tensors();
        if (rank.where.rank == 0) {
          fast = clock;
          most = std::max<int64_t>(most, clock - server.clocks()[1]);
        }
        server.clock();
      }
      return 0;
    });
    CHECK(most == staleness);
  }
}

TEST_CASE("a staleness of its own: a loose table does not wait where a strict one would") {
  const auto seen = on_workers<std::vector<bool>>(2, [&](ThreadRank& rank) {
    ps::ParameterServer server(
        rank.communicator,
        {zeros_table("strict", 1, ps::Sum{}, {.staleness = 0}), zeros_table("loose", 1, ps::Sum{})},
        {.mode = ps::Mode::kSsp, .staleness = 1});
    std::vector<bool> seen;
    if (rank.where.rank == 0) {
      server.clock();
      Pending strict = server.dense("strict").pull_tensors_async();
      Pending loose = server.dense("loose").pull_tensors_async();
      seen = {strict.done(), loose.done()};
      rank.communicator->barrier("seen").wait();
      strict.wait();
      seen.push_back(strict.result().size() == 1 && loose.result().size() == 1);
    } else {
      rank.communicator->barrier("seen").wait();
      server.clock();
    }
    return seen;
  });
  CHECK(seen[0] == std::vector<bool>{false, true, true});
}

TEST_CASE("clock() never waits under ssp, and a pull never under async") {
  for (const ps::Mode mode : {ps::Mode::kSsp, ps::Mode::kAsync}) {
    const auto seen = on_workers<std::vector<int64_t>>(2, [&](ThreadRank& rank) {
      ps::Options options;
      options.mode = mode;
      ps::ParameterServer server(rank.communicator, {zeros_table("t", 1, ps::Sum{})}, options);
      std::vector<int64_t> seen;
      if (rank.where.rank == 0) {
        for (int64_t clock = 0; clock < 10; ++clock) {
          server.dense("t").push_tensors(named_x(at::ones({1})));
          server.clock();
          if (mode == ps::Mode::kAsync)
            seen.push_back(server.dense("t").pull_tensors()["x"].item<int64_t>());
        }
        seen.push_back(server.clocks()[1]);
      }
      rank.communicator->barrier("the first one has clocked").wait();
      return seen;
    });
    if (mode == ps::Mode::kSsp) CHECK(seen[0] == std::vector<int64_t>{0});
    if (mode == ps::Mode::kAsync)
      CHECK(seen[0] == std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0});
  }
}

TEST_CASE("ssp: each push is a step of its own, undivided, and seen at once") {
  const auto seen = on_workers<double>(1, [](ThreadRank& rank) {
    ps::ParameterServer server(rank.communicator,
                               {zeros_table("t", 1, ps::SGD{.lr = 1, .momentum = 0.5})},
                               {.mode = ps::Mode::kSsp});
    ps::DenseTable& table = server.dense("t");
    table.push_tensors(named_x(-at::ones({1})));
    table.push_tensors(named_x(-at::ones({1})));  // momentum: 1, then 1.5
    table.set_lr(2);
    table.push_tensors(named_x(-at::ones({1})));
    return table.pull_tensors()["x"].item<double>();
  });
  CHECK(seen[0] == 1 + 1.5 + 2 * 1.75);
}

TEST_CASE("ssp, async: no push is lost between workers, in tables of many blocks") {
  for (const ps::Mode mode : {ps::Mode::kSsp, ps::Mode::kAsync}) {
    const auto seen = on_workers<at::Tensor>(4, [&](ThreadRank& rank) {
      ps::Options options{.mode = mode};
      ps::ParameterServer server(rank.communicator, {zeros_table("t", 200000, ps::Sum{})}, options);
      ps::DenseTable& table = server.dense("t");
      for (int64_t clock = 0; clock < 20; ++clock) {
        table.push_tensors(named_x(at::ones({200000})));
        server.clock();
      }
      rank.communicator->barrier("pushed").wait();
      return table.pull_tensors()["x"];
    });
    for (const at::Tensor& tensor : seen) CHECK(at::equal(tensor, at::full({200000}, 80.0)));
  }
}

}  // namespace trireme::clock_log_test
