// Who shares a host, what goes wrong and what it says.

#include <atomic>
#include <catch2/catch.hpp>
#include <csignal>
#include <shm/two_processes.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

namespace trireme::host_group_test {

using namespace trireme::shm;
using namespace trireme::shm::test;
using std::chrono::milliseconds;

TEST_CASE("ranks that see each other are a host; a partition separates them") {
  std::vector<std::vector<std::vector<int64_t>>> hosts(4);
  std::vector<float> sums(4);
  run_shm_ranks({.world = 4, .partitions = {"a", "b", "b", "b"}}, [&](ShmRank& self) {
    const auto own = static_cast<size_t>(self.rank);
    hosts[own] = self.group.hosts();
    std::vector<float> values(1, static_cast<float>(self.rank + 1));
    self.collectives.all_reduce(pieces_of(values), {}, {});
    sums[own] = values[0];
  });
  for (const auto& found : hosts) CHECK(found == std::vector<std::vector<int64_t>>{{0}, {1, 2, 3}});
  CHECK(sums == std::vector<float>{1, 9, 9, 9});
}

TEST_CASE("several groups at once, entered in opposite order by two threads each") {
  MemoryExchange first, second;
  std::vector<float> results(4);
  const auto work = [](Exchange& exchange, int64_t rank, float& result) {
    const auto group = HostGroup::join(exchange, {{rank, 2}});
    Collectives collectives(*group);
    std::vector<float> values(100'000, 1);
    for (int i = 0; i < 50; ++i)
      collectives.all_reduce(pieces_of(values), {Dtype::kF32, ReduceOp::kAvg}, {});
    result = values.back();
  };
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 4; ++i) {
    threads.emplace_back(
        [&, i] { work(i < 2 ? first : second, static_cast<int64_t>(i % 2), results[i]); });
  }
  for (auto& thread : threads) thread.join();
  CHECK(results == std::vector<float>(4, 1));
}

TEST_CASE("different calls raise on every rank, name both, move nothing, and the group goes on") {
  struct Case {
    std::string expected;
    std::function<void(ShmRank&)> of_0, of_others;
  };
  std::vector<float> dummy;
  const std::vector<Case> cases = {
      {"rank 0 called all_reduce of 8 float32 by SUM, rank 2 called all_reduce of 9 float32 by SUM",
       [](ShmRank& self) { sum(self.collectives, 8); },
       [](ShmRank& self) { sum(self.collectives, self.rank == 1 ? 8 : 9); }},
      {"rank 0 called all_reduce of 100000 float32 by SUM 'a', rank 1 called all_reduce of 100000 "
       "float32 by SUM 'b'",
       [](ShmRank& self) { sum(self.collectives, 100'000, "a"); },
       [](ShmRank& self) { sum(self.collectives, 100'000, "b"); }},
      {"rank 0 called barrier, rank 1 called broadcast of 4 float32 with root 1",
       [](ShmRank& self) { self.collectives.barrier({}); },
       [](ShmRank& self) {
         std::vector<float> values(4);
         self.collectives.broadcast(pieces_of(values), 1, Dtype::kF32, {});
       }},
      {"rank 0 called broadcast of 4 float32 with root 0, rank 1 called broadcast of 4 float32 "
       "with root 1",
       [](ShmRank& self) {
         std::vector<float> values(4);
         self.collectives.broadcast(pieces_of(values), 0, Dtype::kF32, {});
       },
       [](ShmRank& self) {
         std::vector<float> values(4);
         self.collectives.broadcast(pieces_of(values), 1, Dtype::kF32, {});
       }},
      {"rank 0 called all_reduce of 4 float32 by SUM, rank 1 called all_reduce of 4 int32 by MAX",
       [](ShmRank& self) { sum(self.collectives, 4); },
       [](ShmRank& self) {
         std::vector<int32_t> values(4);
         self.collectives.all_reduce(pieces_of(values), {Dtype::kI32, ReduceOp::kMax}, {});
       }},
      {"rank 0 called all_reduce of 4 float32 by SUM, rank 1 refused: got a sparse tensor",
       [](ShmRank& self) { sum(self.collectives, 4); },
       [](ShmRank& self) { self.collectives.refuse("got a sparse tensor", {}); }},
      {"all_to_all: rank 0 sends 4 bytes to rank 1, which expects 8",
       [](ShmRank& self) {
         std::vector<float> v(1);
         const std::vector<Pieces> pieces(3, pieces_of(v));
         self.collectives.all_to_all(pieces, pieces, Dtype::kF32, {});
       },
       [](ShmRank& self) {
         std::vector<float> v(2);
         const std::vector<Pieces> two(3, pieces_of(v));
         self.collectives.all_to_all(two, two, Dtype::kF32, {});
       }},
  };
  std::vector<std::vector<Failure>> failures(3, std::vector<Failure>(cases.size()));
  std::vector<int> wrong(3);
  run_shm_ranks({3}, [&](ShmRank& self) {
    const auto own = static_cast<size_t>(self.rank);
    for (size_t i = 0; i < cases.size(); ++i) {
      failures[own][i] =
          failure_of([&] { (self.rank == 0 ? cases[i].of_0 : cases[i].of_others)(self); });
      std::vector<float> values(70'000, static_cast<float>(self.rank));
      self.collectives.all_reduce(pieces_of(values), {}, {});
      wrong[own] += values != std::vector<float>(values.size(), 3);
    }
  });
  for (size_t rank = 0; rank < 3; ++rank) {
    for (size_t i = 0; i < cases.size(); ++i) {
      CHECK(failures[rank][i].kind == FaultKind::kMismatch);
      CHECK(contains(failures[rank][i].text, "(rank " + std::to_string(rank) + " of 3)"));
      if (rank == 0) CHECK_THAT(failures[0][i].text, Catch::Contains(cases[i].expected));
    }
  }
  CHECK(wrong == std::vector<int>(3));
}

TEST_CASE("a rank that leaves makes the others raise, also the ones that wait for somebody else") {
  std::vector<Failure> failures(3);
  run_shm_ranks({3}, [&](ShmRank& self) {
    if (self.rank == 2) return;
    failures[static_cast<size_t>(self.rank)] =
        failure_of([&] { sum(self.collectives, 200'000, "bucket 3"); });
  });
  for (size_t rank = 0; rank < 2; ++rank) {
    INFO(failures[rank].text);
    CHECK((failures[rank].kind == FaultKind::kPeerLost ||
           failures[rank].kind == FaultKind::kAborted));
    CHECK(contains(failures[rank].text, "rank 2 (process "));
    CHECK(contains(failures[rank].text, "ended normally"));
    CHECK(contains(failures[rank].text, "all_reduce of 200000 float32 by SUM 'bucket 3'"));
  }
}

TEST_CASE("a killed process is named, before, inside and after a collective") {
  for (const int when : {0, 1, 2}) {
    run_two_processes(
        [when](ShmRank& self) {
          if (when == 2) sum(self.collectives, 10);
          if (when != 1) ::kill(::getpid(), SIGKILL);
          for (;;) sum(self.collectives, 3'000'000, "many");
        },
        [when](ShmRank& self, pid_t child) {
          std::thread killer;
          if (when == 1) {
            for (int i = 0; i < 3; ++i) sum(self.collectives, 3'000'000, "many");
            killer = std::thread([&self, child] {
              const uint64_t begun = self.group.block(1).entered;
              until([&] { return self.group.block(1).entered > begun; });
              ::kill(child, SIGKILL);
            });
          }
          if (when == 2) sum(self.collectives, 10);
          const Failure failure = failure_of([&] {
            for (;;) sum(self.collectives, 3'000'000, "many");
          });
          if (killer.joinable()) killer.join();
          INFO(failure.text);
          CHECK(failure.kind == FaultKind::kPeerLost);
          CHECK(contains(failure.text, "rank 1 (process " + std::to_string(child) + ") has died"));
          CHECK(contains(failure.text, "all_reduce of 3000000 float32 by SUM 'many'"));
          const Failure later = failure_of([&] { sum(self.collectives, 1); });
          CHECK(later.kind == FaultKind::kAborted);
          CHECK(contains(later.text, "has died"));
        });
  }
}

TEST_CASE("a stopped process is alive but not progressing; continued in time it goes on") {
  const auto child = [](ShmRank& self) {
    for (int i = 0; i < 2; ++i) sum(self.collectives, 100'000);
    ::raise(SIGSTOP);
    for (int i = 0; i < 2; ++i) sum(self.collectives, 100'000, "after");
    ::pause();
  };
  run_two_processes(child, [](ShmRank& self, pid_t pid) {
    for (int i = 0; i < 2; ++i) sum(self.collectives, 100'000);
    ::waitpid(pid, nullptr, WUNTRACED);
    const Failure failure =
        failure_of([&] { sum(self.collectives, 100'000, "after", milliseconds(300)); });
    INFO(failure.text);
    CHECK(failure.kind == FaultKind::kTimeout);
    CHECK(contains(failure.text,
                   "has not come within 300 ms; it is alive (stopped) but not "
                   "progressing; its last operation: collective 2, all_reduce"));
  });
  run_two_processes(child, [](ShmRank& self, pid_t pid) {
    for (int i = 0; i < 2; ++i) sum(self.collectives, 100'000);
    ::waitpid(pid, nullptr, WUNTRACED);
    std::thread go_on([&self, pid] {
      until_asleep(self.group, 0);
      ::kill(pid, SIGCONT);
    });
    const Failure failure = failure_of([&] {
      for (int i = 0; i < 2; ++i) sum(self.collectives, 100'000, "after");
    });
    go_on.join();
    CHECK(failure.text == "no fault");
  });
}

TEST_CASE("who waits too long for a rank also names the one that is further behind") {
  std::atomic<bool> has_entered{false};
  std::atomic<bool> is_done{false};
  Failure failure;
  run_shm_ranks({3}, [&](ShmRank& self) {
    self.collectives.barrier({});
    // Its time begins with its call.
    until([&] { return self.rank != 0 || has_entered; });
    if (self.rank < 2) {
      self.group.begin({.verb = Verb::kBarrier}, milliseconds(200));
      self.group.enter();
    }
    if (self.rank == 1) has_entered = true;
    if (self.rank == 0) {
      failure = failure_of([&] { self.group.wait(1, &RankBlock::arrived, ~uint64_t{0}); });
      is_done = true;
    }
    until([&] { return is_done.load(); });
  });
  INFO(failure.text);
  CHECK(failure.kind == FaultKind::kTimeout);
  CHECK(contains(failure.text, "rank 1 (process "));
  CHECK(contains(failure.text, "its last operation: collective 2, barrier; rank 2 (process "));
  CHECK(contains(failure.text, ") is further behind, its last operation: collective 1, barrier"));
}

TEST_CASE("a forked child may read, but no more, and its end changes nothing") {
  int status = -1;
  run_shm_ranks({2}, [&](ShmRank& self) {
    sum(self.collectives, 1000);
    if (self.rank == 0) {
      const pid_t child = ::fork();
      if (child == 0) {
        const Failure failure = failure_of([&] { sum(self.collectives, 1000); });
        const bool reads = self.group.block(1).rank == 1;
        ::_exit(reads && failure.kind == FaultKind::kForked ? 0 : 1);
      }
      ::waitpid(child, &status, 0);
    }
    sum(self.collectives, 1000);
  });
  CHECK(status == 0);
}

TEST_CASE("the address of a segment reads back, and nothing else does") {
  const SegmentAddress address{SegmentKind::kNamed, 42, -1, 4096, random_nonce()};
  CHECK(SegmentAddress::parse(address.to_string()) == address);
  for (const std::string text : {"", "x", "0 1 2 3 4", "9 1 2 3 4 5", "0 -1 2 3 4 5",
                                 "0 1 2 -3 4 5", "0 1 2 3 4 5 6", "0 1 2 3 4 zz", "0 1  2 3 4 5"})
    CHECK_FALSE(SegmentAddress::parse(text));
}

TEST_CASE("a segment of each kind is found by its address and by no other") {
  for (const SegmentKind kind : {SegmentKind::kAnonymous, SegmentKind::kNamed}) {
    Segment mine = Segment::create(kind, 5000);
    mine.data()[4999] = std::byte{7};
    std::string why_not;
    const Segment theirs = Segment::open(mine.address(), why_not);
    REQUIRE(theirs);
    CHECK(theirs.data()[4999] == std::byte{7});
    CHECK(theirs.data() != mine.data());

    SegmentAddress other = mine.address();
    other.nonce[1] ^= 1;
    CHECK_FALSE(Segment::open(other, why_not));
    other = mine.address();
    other.bytes += 1;
    CHECK_FALSE(Segment::open(other, why_not));
    mine.unlink_name();
    if (kind == SegmentKind::kNamed) {
      CHECK_FALSE(Segment::open(mine.address(), why_not));
      CHECK(contains(why_not, "cannot open /trireme-"));
    }
  }
}

TEST_CASE("too much memory is an error with what is needed and what is free") {
  const Failure failure =
      failure_of([] { Segment::create(SegmentKind::kAnonymous, int64_t{1} << 50); });
  CHECK(failure.kind == FaultKind::kMemory);
  CHECK_THAT(failure.text, Catch::Contains("needs 1125899906842688 bytes, free are "));
}

}  // namespace trireme::host_group_test
