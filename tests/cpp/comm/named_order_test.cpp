// Ranks that issue operations in orders of their own run them in one, whoever keeps the book.

#include <trireme/comm/named_order.h>

#include <algorithm>
#include <atomic>
#include <catch_torch.h>
#include <string>
#include <thread>
#include <thread_ranks.h>
#include <vector>

namespace trireme::named_order_test {

using trireme::test::Engine;
using trireme::test::run_thread_ranks;
using trireme::test::ThreadRank;
using Names = std::vector<std::string>;

namespace {

constexpr auto kTimeout = std::chrono::seconds(30);

NamedOperation named(const std::string& name, const std::string& shape = "[3]") {
  return {name, NameBook::kAllRanks, "allreduce", {{"shape", shape}}, "", true};
}

// Runs what comes in the calling thread, or lets another one do so where there are no turns.
AgreedOperation next_here(NamedOrder& order) {
  if (!order.begin_turn()) {
    order.wait_for_next();
    return order.next().value();
  }
  std::optional<AgreedOperation> agreed;
  while (!agreed) agreed = order.next_in_turn();
  order.end_turn();
  return *std::move(agreed);
}

}  // namespace

TEST_CASE("Operations issued in other orders get one order", "[named_order]") {
  const Engine engine = GENERATE(Engine::kShm, Engine::kGloo);
  constexpr int64_t kWorld = 3;
  constexpr int kNames = 40;
  std::vector<Names> ran(kWorld);
  run_thread_ranks(
      kWorld,
      [&](ThreadRank& self) {
        NamedOrder order(self.communicator, {});
        Names names;
        for (int i = 0; i < kNames; ++i) names.push_back("x" + std::to_string(i));
        std::rotate(names.begin(), names.begin() + 11 * self.where.rank, names.end());
        for (const std::string& name : names) order.announce(named(name));
        Names& own = ran[static_cast<size_t>(self.where.rank)];
        for (int i = 0; i < kNames; ++i) own.push_back(next_here(order).operation.name);
        order.announce(named("last"));
        own.push_back(next_here(order).operation.name);
      },
      kTimeout, engine);
  CHECK(ran[0].size() == kNames + 1);
  CHECK(ran[1] == ran[0]);
  CHECK(ran[2] == ran[0]);
}

TEST_CASE("A thread beside runs what comes while nobody waits, and ends with close()",
          "[named_order]") {
  const Engine engine = GENERATE(Engine::kShm, Engine::kGloo);
  std::vector<Names> ran(2);
  run_thread_ranks(
      2,
      [&](ThreadRank& self) {
        NamedOrder order(self.communicator, {});
        Names& own = ran[static_cast<size_t>(self.where.rank)];
        std::thread beside([&] {
          while (order.wait_for_next())
            if (const auto agreed = order.next()) {
              own.push_back(agreed->error.empty() ? agreed->operation.name : agreed->error);
              if (own.size() == 2) order.close();
            }
        });
        order.announce(named("same"));
        order.announce(named("differs", self.where.rank == 0 ? "[3]" : "[4]"));
        beside.join();
      },
      kTimeout, engine);
  CHECK(ran[0] == ran[1]);
  CHECK(ran[0][0] == "same");
  CHECK(ran[0][1] == "got another shape on each rank: rank 0 has [3], rank 1 has [4]");
}

TEST_CASE("What a rank lacks is reported once and given up on the others", "[named_order]") {
  const Engine engine = GENERATE(Engine::kShm, Engine::kGloo);
  std::vector<std::string> said(2);
  std::atomic<bool> is_over = false;
  run_thread_ranks(
      2,
      [&](ThreadRank& self) {
        using std::chrono::milliseconds;
        NamedOrder order(self.communicator, {milliseconds(20), milliseconds(300)});
        if (self.where.rank == 0) {
          order.announce(named("alone"));
          while (said[1].empty() && order.wait_for_next()) {
            if (const auto report = order.take_report()) said[0] += *report;
            if (const auto agreed = order.next()) said[1] = agreed->error;
          }
          is_over = true;
        }
        while (!is_over) std::this_thread::yield();
      },
      std::chrono::seconds(2), engine);
  CHECK(said[0] == "allreduce 'alone': issued by rank 0, missing on rank 1");
  CHECK(said[1] == "waited for too long: issued by rank 0, missing on rank 1");
}

}  // namespace trireme::named_order_test
