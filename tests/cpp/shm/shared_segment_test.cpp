// One segment for all ranks of a host, or for none of them.

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <cstring>
#include <fstream>
#include <random>
#include <shm/two_processes.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

namespace trireme::shared_segment_test {

using namespace trireme::shm;
using namespace trireme::shm::test;

namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kTooMuch = int64_t{1} << 50;

// Returns the bytes of the file behind it, as the maker has it open.
int64_t reserved_bytes(const Segment& segment) {
  const SegmentAddress& address = segment.address();
  const std::string path =
      "/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.fd);
  struct stat found{};
  return ::stat(path.c_str(), &found) == 0 ? int64_t{found.st_blocks} * 512 : -1;
}

void limit(int resource, rlim_t most) {
  rlimit now{};
  ::getrlimit(static_cast<__rlimit_resource>(resource), &now);
  now.rlim_cur = std::min(most, now.rlim_max);
  ::setrlimit(static_cast<__rlimit_resource>(resource), &now);
}

rlim_t mapped_bytes() {
  rlim_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<rlim_t>(::getpagesize());
}

pid_t child_that_ends_with(int code) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(code);
  return child;
}

// Waits until a child has ended, without reaping it.
void await_end(pid_t child) {
  siginfo_t info;
  ::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT);
}

}  // namespace

TEST_CASE("what a rank writes into a shared segment all others see; all of it is reserved") {
  for (const int64_t world : {1, 2, 3, 5}) {
    std::vector<int> wrong(static_cast<size_t>(world));
    run_shm_ranks({world}, [&](ShmRank& self) {
      for (const int64_t bytes : {world, int64_t{4096}, 3 * kMiB + 7}) {
        const SharedSegment shared = self.collectives.share_segment(bytes, {});
        int& found = wrong[static_cast<size_t>(self.rank)];
        found += !shared.segment || !shared.why_not.empty() || shared.segment.bytes() != bytes ||
                 reserved_bytes(shared.segment) < bytes;
        const auto part = [&](int64_t rank) {
          return shared.segment.data() + rank * bytes / world;
        };
        found += *part(self.rank) != std::byte{0};
        self.collectives.barrier({});
        *part(self.rank) = static_cast<std::byte>(self.rank + 1);
        self.collectives.barrier({});
        for (int64_t rank = 0; rank < world; ++rank)
          found += *part(rank) != static_cast<std::byte>(rank + 1);
      }
    });
    CHECK(wrong == std::vector<int>(wrong.size()));
  }
}

TEST_CASE("where the first rank has no memory all get the same reason, and go on") {
  std::vector<std::string> why(3);
  std::vector<int> shared_after(3);
  run_shm_ranks({3}, [&](ShmRank& self) {
    const auto own = static_cast<size_t>(self.rank);
    const SharedSegment none = self.collectives.share_segment(kTooMuch, {});
    why[own] = none.segment ? "got it" : none.why_not;
    shared_after[own] = static_cast<bool>(self.collectives.share_segment(kMiB, {}).segment);
  });
  CHECK_THAT(why[0], Catch::Contains("rank 0 says: [segment] got no memory to share") &&
                         Catch::Contains("bytes, free are "));
  CHECK(why == std::vector<std::string>(3, why[0]));
  CHECK(shared_after == std::vector<int>(3, 1));
}

TEST_CASE("where one process cannot open or map it neither has it, and both go on") {
  struct Case {
    int resource;
    bool of_memory;
    std::string expected;
  };
  for (const Case& scenario : {Case{RLIMIT_NOFILE, false, "rank 1 says: cannot open /proc/"},
                               Case{RLIMIT_AS, true, "rank 1 says: cannot map "}}) {
    const auto failing = [&](ShmRank& self) {
      const SharedSegment none = self.collectives.share_segment(64 * kMiB, {});
      return !none.segment && contains(none.why_not, scenario.expected);
    };
    const auto agree = [](ShmRank& self, bool fine) {
      std::vector<int32_t> votes{fine ? 1 : 0};
      self.collectives.all_reduce(pieces_of(votes), {Dtype::kI32, ReduceOp::kMin}, {});
      return votes[0] == 1;
    };
    run_two_processes(
        [&](ShmRank& self) {
          agree(self, true);  // makes the rings
          limit(scenario.resource, scenario.of_memory ? mapped_bytes() + 16 * kMiB : 0);
          const bool failed = failing(self);
          limit(scenario.resource, RLIM_INFINITY);
          agree(self, failed && self.collectives.share_segment(kMiB, {}).segment);
          agree(self, true);
        },
        [&](ShmRank& self, pid_t) {
          agree(self, true);
          CHECK(failing(self));
          CHECK(self.collectives.share_segment(kMiB, {}).segment);
          CHECK(agree(self, true));
          agree(self, true);  // before this rank goes
        });
  }
}

TEST_CASE("a peer is not dead because this rank may open no file, and so cannot look") {
  const PeerProcess peer(::getppid());
  limit(RLIMIT_NOFILE, 0);
  const bool is_alive = peer.alive();
  limit(RLIMIT_NOFILE, RLIM_INFINITY);
  CHECK(is_alive);
}

TEST_CASE("how a process has ended is known before its parent asks, a normal end too") {
  for (const int code : {0, 3}) {
    const pid_t child = child_that_ends_with(code);
    const PeerProcess peer(child);
    await_end(child);
    CHECK(peer.wait_status() == code << 8);
    ::waitpid(child, nullptr, 0);
  }
}

TEST_CASE("how a process has ended is known while it is reaped, where the kernel tells it after") {
  const pid_t reaped = child_that_ends_with(3);
  const PeerProcess reaped_peer(reaped);
  ::waitpid(reaped, nullptr, 0);
  const bool tells_after = reaped_peer.wait_status() == 3 << 8;
  int untold = 0;
  for (int i = 0; i < 300; ++i) {
    const pid_t child = child_that_ends_with(3);
    const PeerProcess peer(child);
    await_end(child);
    std::atomic<bool> both_go{false};
    std::thread parent([&] {
      while (!both_go) {
      }
      ::waitpid(child, nullptr, 0);
    });
    both_go = true;
    untold += peer.wait_status() != 3 << 8;
    parent.join();
  }
  CHECK((untold == 0 || !tells_after));
}

TEST_CASE("a killed process is named by who waits to share with it") {
  run_two_processes(
      [](ShmRank& self) {
        self.collectives.barrier({});
        ::kill(::getpid(), SIGKILL);
      },
      [](ShmRank& self, pid_t child) {
        self.collectives.barrier({});
        const Failure failure =
            failure_of([&] { self.collectives.share_segment(kMiB, {.label = "store"}); });
        CHECK(failure.kind == FaultKind::kPeerLost);
        CHECK_THAT(failure.text,
                   Catch::Contains("share of 1048576 bytes with root 0 'store': rank 1 (process " +
                                   std::to_string(child) + ") has died"));
      });
}

TEST_CASE("ranks that share different things raise, naming both") {
  std::vector<Failure> bytes(2), kinds(2);
  run_shm_ranks({2}, [&](ShmRank& self) {
    const auto own = static_cast<size_t>(self.rank);
    bytes[own] = failure_of([&] { self.collectives.share_segment(100 + self.rank, {}); });
    kinds[own] = failure_of([&] {
      if (self.rank == 0) self.collectives.share_segment(100, {.label = "store"});
      if (self.rank == 1) self.collectives.share_segments(100, {.label = "store"});
    });
  });
  for (size_t rank = 0; rank < 2; ++rank) {
    CHECK_THAT(bytes[rank].text, Catch::Contains("share of 100 bytes with root 0") &&
                                     Catch::Contains("share of 101 bytes with root 0"));
    CHECK_THAT(kinds[rank].text, Catch::Contains("share of 100 bytes 'store'") &&
                                     Catch::Contains("share of 100 bytes with root 0 'store'"));
  }
}

TEST_CASE("segments of both kinds, made, refused and dropped between other collectives") {
  constexpr int kRounds = 60;
  std::vector<int> wrong(4);
  run_shm_ranks({4}, [&](ShmRank& self) {
    std::mt19937 random(11);
    int& found = wrong[static_cast<size_t>(self.rank)];
    std::vector<Segment> kept;
    for (int round = 0; round < kRounds; ++round) {
      const auto kind = random() % 4;
      const int64_t bytes = static_cast<int64_t>(random() % 50'000) + 8;
      if (kind == 0) {
        SharedSegment shared = self.collectives.share_segment(bytes, {});
        self.collectives.broadcast({shared.segment.data() + self.rank, 1}, 0, Dtype::kBytes, {});
        kept.push_back(std::move(shared.segment));
      } else if (kind == 1) {
        found += static_cast<bool>(self.collectives.share_segment(kTooMuch, {}).segment);
      } else if (kind == 2) {
        found += self.collectives.share_segments(bytes, {}).size() != 4;
      } else {
        std::vector<float> values(static_cast<size_t>(bytes), 1);
        self.collectives.all_reduce(pieces_of(values), {}, {});
        found += values.back() != 4;
      }
      if (kept.size() > 3) kept.erase(kept.begin());
    }
  });
  CHECK(wrong == std::vector<int>(4));
}

}  // namespace trireme::shared_segment_test
