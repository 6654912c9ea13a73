// One-sided reduction, and how a group goes on after work was abandoned.

#include <trireme/shm/deposit_ring.h>

#include <catch2/catch.hpp>
#include <random>
#include <shm/two_processes.h>

namespace trireme::deposit_ring_test {

using namespace trireme::shm;
using namespace trireme::shm::test;
using std::chrono::milliseconds;

namespace {

using Values = std::vector<int32_t>;

Operation round_of(const Values& values, std::string_view label = "plan") {
  return {.verb = Verb::kDeposit,
          .count = static_cast<int64_t>(values.size() * sizeof(int32_t)),
          .label = label};
}

// One rank's side of a round: deposits in runs of random length, collects in between, and waits
// only when it can do neither.
struct Round {
  DepositRing& ring;
  ShmRank& self;
  const Values& mine;
  Values& sums;
  int64_t total = static_cast<int64_t>(mine.size() * sizeof(int32_t));

  bool deposit(int64_t at_most) {
    const auto room = ring.room(std::min(at_most, total - ring.deposited()));
    const auto* source = reinterpret_cast<const std::byte*>(mine.data()) + ring.deposited();
    std::copy_n(source, room.size(), room.data());
    if (!room.empty()) ring.deposit(static_cast<int64_t>(room.size()));
    return !room.empty();
  }
  bool collect(int64_t at_most) {
    const int64_t bytes = ring.ready(std::min(at_most, total - ring.collected()));
    if (bytes == 0) return false;
    for (int64_t i = 0; i < bytes / 4; ++i) {
      int32_t& sum = sums[static_cast<size_t>(ring.collected() / 4 + i)] = 0;
      for (int64_t peer = 0; peer < self.group.world(); ++peer)
        sum += reinterpret_cast<const int32_t*>(ring.of(peer))[i];
    }
    ring.collect(bytes);
    return true;
  }
  // What lies between the end and the next multiple of a line is deposited and collected too.
  void finish() {
    const int64_t pad = (total + 63) / 64 * 64 - total;
    while (ring.collected() < total) {
      const bool moved = deposit(total) | collect(total);
      if (!moved) ring.wait("the rest");
    }
    while (pad > 0 && ring.collected() < total + pad) {
      if (const auto room = ring.room(total + pad - ring.deposited()); !room.empty())
        ring.deposit(static_cast<int64_t>(room.size()));
      if (const int64_t bytes = ring.ready(total + pad - ring.collected()); bytes > 0)
        ring.collect(bytes);
      else
        ring.wait("the end");
    }
  }
};

Values values_of(int64_t rank, size_t numel, int step) {
  Values values(numel);
  for (size_t i = 0; i < numel; ++i)
    values[i] = static_cast<int32_t>(i) * 7 + static_cast<int32_t>(rank) * 1000 + step;
  return values;
}

}  // namespace

TEST_CASE("what all deposited is collected, whatever the pace, the sizes and the ring") {
  for (const int64_t world : {1, 2, 3, 5}) {
    std::vector<int> wrong(static_cast<size_t>(world));
    run_shm_ranks({world}, [&](ShmRank& self) {
      DepositRing ring(self.collectives, 4096, {});
      std::mt19937 random(static_cast<unsigned>(self.rank));
      for (int step = 0; step < 60; ++step) {
        const size_t numel = static_cast<size_t>(step * step * 3 % 5000);
        const Values mine = values_of(self.rank, numel, step);
        Values sums(numel, -1);
        ring.begin_round(round_of(mine), std::chrono::seconds(20));
        Round round{ring, self, mine, sums};
        for (int i = 0; i < 20; ++i) {
          round.deposit(static_cast<int64_t>(random() % 300) * 4);
          round.collect(static_cast<int64_t>(random() % 300) * 4);
        }
        round.finish();
        Values expected(numel);
        for (int64_t rank = 0; rank < world; ++rank) {
          const Values theirs = values_of(rank, numel, step);
          for (size_t i = 0; i < numel; ++i) expected[i] += theirs[i];
        }
        wrong[static_cast<size_t>(self.rank)] += sums != expected;
      }
    });
    CHECK(wrong == std::vector<int>(static_cast<size_t>(world)));
  }
}

TEST_CASE("two rings of a group, with collectives between, do not mix") {
  std::vector<int> wrong(3);
  run_shm_ranks({3}, [&](ShmRank& self) {
    DepositRing first(self.collectives, 1024, {}), second(self.collectives, 8192, {});
    for (int step = 0; step < 20; ++step) {
      const Values a = values_of(self.rank, 1000, step), b = values_of(self.rank, 700, -step);
      Values a_sums(a.size()), b_sums(b.size());
      first.begin_round(round_of(a, "a"), std::chrono::seconds(20));
      second.begin_round(round_of(b, "b"), std::chrono::seconds(20));
      Round of_a{first, self, a, a_sums}, of_b{second, self, b, b_sums};
      of_a.deposit(400);
      of_b.deposit(400);
      self.collectives.barrier({});
      of_b.finish();
      of_a.finish();
      wrong[static_cast<size_t>(self.rank)] +=
          a_sums[999] != 3 * (999 * 7 + 1000 + step) || b_sums[0] != 3 * (1000 - step);
    }
  });
  CHECK(wrong == std::vector<int>(3));
}

TEST_CASE("ranks that deposit different things raise, naming both") {
  std::vector<Failure> failures(2);
  run_shm_ranks({2}, [&](ShmRank& self) {
    DepositRing ring(self.collectives, 1024, {});
    const Values mine(self.rank == 0 ? 10 : 11);
    Values sums(mine.size());
    failures[static_cast<size_t>(self.rank)] = failure_of([&] {
      ring.begin_round(round_of(mine), std::chrono::seconds(20));
      Round{ring, self, mine, sums}.finish();
    });
  });
  for (const Failure& failure : failures) {
    CHECK((failure.kind == FaultKind::kMismatch || failure.kind == FaultKind::kAbandoned));
    CHECK_THAT(failure.text,
               Catch::Contains("deposit of 40 bytes") && Catch::Contains("deposit of 44 bytes"));
  }
}

TEST_CASE("a rank that does not come is named at the deadline") {
  std::vector<Failure> failures(2);
  run_shm_ranks({2}, [&](ShmRank& self) {
    DepositRing ring(self.collectives, 1024, {});
    const Values mine(10);
    Values sums(mine.size());
    if (self.rank == 0) {
      ring.begin_round(round_of(mine), milliseconds(200));
      failures[0] = failure_of([&] { Round{ring, self, mine, sums}.finish(); });
    }
    if (self.rank == 1) failures[1] = failure_of([&] { self.collectives.barrier({}); });
  });
  CHECK(failures[0].kind == FaultKind::kTimeout);
  CHECK_THAT(failures[1].text, Catch::Contains("the rest: rank 1 (process"));
  CHECK_THAT(failures[0].text, Catch::Contains("the rest: rank 1 (process"));
}

TEST_CASE("what one rank abandons all abandon, with its reason, and the next step works") {
  constexpr int kSteps = 40;
  std::vector<std::vector<std::string>> said(3, std::vector<std::string>(kSteps));
  std::vector<int> wrong(3), right(3);
  run_shm_ranks({3}, [&](ShmRank& self) {
    const auto own = static_cast<size_t>(self.rank);
    DepositRing ring(self.collectives, 2048, {});
    std::mt19937 random(static_cast<unsigned>(self.rank));
    for (int step = 0; step < kSteps; ++step) {
      // Now and then a rank leaves at some point of a round; the others may be anywhere in theirs.
      const bool leaves = step % 4 == 1 && step / 4 % 3 == self.rank;
      const int64_t offset = static_cast<int64_t>(random() % 750) * 4;
      const Values mine = values_of(self.rank, 2000, step);
      Values sums(mine.size());
      std::vector<float> more(50'000, 1);
      if (self.group.has_abandoned()) self.collectives.barrier({});
      const Failure failure = failure_of([&] {
        ring.begin_round(round_of(mine), std::chrono::seconds(20));
        Round round{ring, self, mine, sums};
        round.deposit(offset);
        if (leaves && step % 8 == 1) throw Fault(FaultKind::kAborted, "spilled the coffee");
        self.collectives.all_reduce(pieces_of(more), {}, {});
        round.collect(1000);
        if (leaves) throw Fault(FaultKind::kAborted, "spilled the coffee");
        round.finish();
      });
      if (failure.kind != FaultKind::kMismatch) {
        said[own][static_cast<size_t>(step)] = failure.text;
        self.group.abandon(failure.text);
        continue;
      }
      wrong[own] += sums[1999] != 3 * (1999 * 7 + 1000 + step) || more[9] != 3;
      ++right[own];
    }
  });
  for (size_t rank = 0; rank < 3; ++rank) {
    CHECK(wrong[rank] == 0);
    CHECK(right[rank] == kSteps * 3 / 4);
    for (int step = 1; step < kSteps; step += 4)
      CHECK_THAT(said[rank][static_cast<size_t>(step)], Catch::Contains("spilled the coffee"));
  }
}

TEST_CASE("a rank that abandons and goes is reported as gone") {
  std::vector<Failure> failures(2);
  run_shm_ranks({2}, [&](ShmRank& self) {
    self.collectives.barrier({});
    if (self.rank == 1) return self.group.abandon("had enough");
    failures[0] = failure_of([&] { self.collectives.barrier({}); });
    failures[1] = failure_of([&] { self.collectives.barrier({}); });
  });
  CHECK_THAT(failures[0].text, Catch::Contains("had enough") || Catch::Contains("left the group"));
  CHECK(failures[1].kind != FaultKind::kMismatch);
}

}  // namespace trireme::deposit_ring_test
