// What ends a wait besides what it waits for, and how ranks are gone.

#include <trireme/common/duration.h>
#include <trireme/common/interruption.h>
#include <trireme/shm/deposit_ring.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <catch2/catch.hpp>
#include <csignal>
#include <map>
#include <shm/post.h>
#include <thread>
#include <unistd.h>

namespace trireme::waits_test {

using namespace trireme::shm;
using namespace trireme::shm::test;
using std::chrono::hours;
using std::chrono::milliseconds;

namespace {

// Is thrown as if a signal handler raised, on the threads that say so.
struct Called final : Interruption {
  Called() : Interruption("Called was raised by a signal handler") {}
};
thread_local bool is_called_away = false;

void look_for_calls() {
  if (is_called_away) throw Called();
}

bool is_interrupted(const std::function<void()>& call) {
  set_interruption_check(&look_for_calls);
  is_called_away = true;
  bool interrupted = false;
  try {
    call();
  } catch (const Called&) {
    interrupted = true;
  }
  is_called_away = false;
  return interrupted;
}

}  // namespace

TEST_CASE("durations that no clock can be moved on by become the longest wait") {
  for (const milliseconds given : {milliseconds::max(), milliseconds(hours(24) * 365 * 300),
                                   milliseconds(-5'830'000'000'000'000), milliseconds::min()}) {
    CHECK(saturated(given) == kLongestWait);
    CHECK(deadline_after(given) > std::chrono::steady_clock::now() + hours(24) * 365 * 99);
  }
  for (const milliseconds given : {milliseconds(-1), milliseconds(0), milliseconds(hours(24))})
    CHECK(saturated(given) == given);
}

TEST_CASE("a timeout of centuries waits, in a collective, for a counter and for a message") {
  const milliseconds very_long = hours(24) * 365 * 300;
  const int wrong = count_wrong({.timeout = very_long}, [&](ShmRank& self, Post& post) {
    Values values = values_of(1, 3);
    if (self.rank == 1) {
      until_asleep(self.group, 0);
      self.collectives.barrier({});
      until_asleep(self.group, 0);
      sum(self.collectives, 5, "late", very_long);
      until_asleep(self.group, 0);
      post.send(values, 0, 0, very_long);
      return 0;
    }
    self.collectives.barrier({});
    sum(self.collectives, 5, "late", very_long);
    return static_cast<int>(post.recv(3, 1, 0, very_long) != values);
  });
  CHECK(wrong == 0);
}

TEST_CASE("the timeout of a group can be set later, for waits beside the collectives, too") {
  Failure failure;
  run_shm_ranks({}, [&](ShmRank& self) {
    self.group.set_timeout(milliseconds(20));
    if (self.rank == 0) failure = failure_of([&] { self.collectives.barrier({}); });
    until([&] { return self.group.failure().has_value(); });
  });
  CHECK(contains(failure.text, "has not come within 20 ms"));
}

TEST_CASE("a rank that is called away abandons its collective, and its peer hears why") {
  std::atomic<bool> interrupted{false};
  Failure failure;
  std::atomic<int> wrong{0};
  run_shm_ranks({}, [&](ShmRank& self) {
    for (int round = 0; round < 2; ++round) {
      if (self.rank == 0) {
        interrupted = is_interrupted([&] { sum(self.collectives, 3'000'000, "bucket 3"); });
      } else {
        until([&] { return interrupted.load(); });
        failure = failure_of([&] { sum(self.collectives, 3'000'000, "bucket 3"); });
        wrong += failure.kind != FaultKind::kAbandoned;
        interrupted = false;
      }
      std::vector<float> values(5, 1);
      self.collectives.all_reduce(pieces_of(values), {}, {});
      wrong += values != std::vector<float>(5, 2);
    }
  });
  INFO(failure.text);
  CHECK(wrong == 0);
  CHECK(contains(failure.text, "rank 0 (process "));
  CHECK(contains(failure.text, "has left it: [host_group] collective "));
  CHECK(contains(failure.text, "Called was raised by a signal handler"));
}

TEST_CASE("a thread that was asleep when its rank left gives up what it runs") {
  std::atomic<bool> has_left{false};
  std::array<Failure, 2> failures;
  run_shm_ranks({}, [&](ShmRank& self) {
    const Operation operation{.verb = Verb::kAllReduce, .count = 3, .label = "bucket 3"};
    if (self.rank == 1) until([&] { return has_left.load(); });
    self.group.begin(operation, std::chrono::seconds(20));
    if (self.rank == 0) {
      self.group.abandon("another thread was called away");
      has_left = true;
      until([&] { return self.group.block(1).entered == 1; });  // check_entered() need not sleep
    }
    failures[static_cast<size_t>(self.rank)] = failure_of([&] {
      self.group.check_entered();
      if (self.rank == 1) self.group.wait_all(&RankBlock::arrived, 1);
    });
    self.collectives.barrier({});
  });
  for (const Failure& failure : failures) {
    INFO(failure.text);
    CHECK(failure.kind == FaultKind::kAbandoned);
    CHECK(contains(failure.text, "has left it: another thread was called away"));
  }
}

TEST_CASE("a rank that is called away from a wait for deposits abandons these") {
  std::atomic<bool> interrupted{false};
  Failure failure;
  run_shm_ranks({}, [&](ShmRank& self) {
    DepositRing ring(self.collectives, 4096, {});
    ring.begin_round({.verb = Verb::kDeposit, .count = 64, .label = "gradients"},
                     std::chrono::seconds(20));
    ring.deposit(64);
    if (self.rank == 0) {
      until([&] { return ring.ready(64) == 64; });
      ring.collect(64);
      ring.begin_round({.verb = Verb::kDeposit, .count = 64, .label = "gradients"},
                       std::chrono::seconds(20));
      ring.deposit(64);
      interrupted = is_interrupted([&] { ring.wait("all_reduce of bucket 0"); });
    } else {
      until([&] { return interrupted.load(); });
      failure = failure_of([&] { sum(self.collectives, 3'000'000); });
    }
    self.collectives.barrier({});
  });
  CHECK(interrupted);
  CHECK(contains(failure.text, "all_reduce of bucket 0: Called was raised by a signal handler"));
}

TEST_CASE("who is called away from a message gets it later") {
  std::atomic<bool> interrupted{false};
  const int wrong = count_wrong({}, [&](ShmRank& self, Post& post) {
    if (self.rank == 1) {
      until([&] { return interrupted.load(); });
      post.send(values_of(1, 3), 0);
      return 0;
    }
    Values values(3);
    const TransferPtr coming = post.start_recv(values, 1);
    interrupted = is_interrupted([&] { post.wait(coming); });
    post.wait(coming);
    return static_cast<int>(values != values_of(1, 3));
  });
  CHECK(interrupted);
  CHECK(wrong == 0);
}

TEST_CASE("a wait on a futex takes what comes while it sleeps, until it has all or is over") {
  Futex futex;
  std::atomic<int> come{0};
  std::atomic<int> taken{0};
  std::atomic<bool> is_over{false};
  std::thread other([&] {
    for (int i = 1; i <= 4; ++i) {
      until([&] { return taken == i - 1 && futex.sleepers > 0; });
      come = std::min(i, 3);
      is_over = i > 3;
      ring(futex);
    }
  });
  const FutexWait wait(futex);
  const auto take = [&] {
    const bool any = come > taken;
    if (any) ++taken;
    return any;
  };
  const auto is_ended = [&] { return is_over.load(); };
  const auto look = [&](int all) {
    return [&, all] { return found_after(take, [&, all] { return taken == all; }); };
  };
  CHECK(wait.until(look(3), is_ended));
  CHECK(taken == 3);
  CHECK_FALSE(wait.until(look(4), is_ended));
  other.join();
  CHECK(futex.sleepers == 0);
  CHECK(spin(1, look(3)));
  CHECK_FALSE(spin(100, look(4)));
}

TEST_CASE("a wait that spares its group ends alone") {
  Failure failure;
  run_shm_ranks({}, [&](ShmRank& self) {
    const std::atomic<uint64_t> never{0};
    const WaitContext context{"a signal", milliseconds(20), /*spares_group=*/true};
    if (self.rank == 0) failure = failure_of([&] { self.group.wait_beside(1, never, 1, context); });
    self.collectives.barrier({});
  });
  CHECK(failure.kind == FaultKind::kTimeout);
  CHECK(contains(failure.text, "a signal: rank 1 (process "));
  CHECK(contains(failure.text, "within 20 ms"));
}

TEST_CASE("a rank that ended well is told apart from one whose process failed or was killed") {
  for (const std::string error : {"", "ValueError: no such file"}) {
    Failure failure;
    run_shm_ranks({}, [&](ShmRank& self) {
      if (self.rank == 1) {
        for (const bool is_done : {false, true}) self.group.show_step(3, is_done);
        return self.group.leave(error);
      }
      failure = failure_of([&] { self.collectives.barrier({}); });
    });
    INFO(failure.text);
    CHECK(failure.kind == FaultKind::kPeerLost);
    CHECK(contains(failure.text,
                   error.empty()
                       ? "ended normally after step 3; its last operation: none"
                       : "has left the group after step 3, ended by ValueError: no such file; "));
    CHECK(contains(failure.text, error.empty()
                                     ? "Did it have fewer batches, or steps? See join() of DDP"
                                     : "Look for the error of that rank; then start"));
  }
}

TEST_CASE("how a process died is told, and in which step") {
  const std::map<int, std::string> ends{{SIGKILL, "it was killed by SIGKILL ("},
                                        {SIGSEGV, "it was killed by SIGSEGV; its last operation"},
                                        {0, "it ended with exit code 7; its last operation"}};
  for (const auto& [signal, said] : ends) {
    run_two_processes(
        [signal = signal](ShmRank& self) {
          for (const uint64_t step : {4, 5}) self.group.show_step(step, step == 4);
          if (signal == 0) ::_exit(7);
          ::signal(signal, SIG_DFL);
          ::raise(signal);
        },
        [&said = said](ShmRank& self, pid_t child) {
          const Failure failure = failure_of([&] { self.collectives.barrier({}); });
          INFO(failure.text);
          CHECK(contains(failure.text, "rank 1 (process " + std::to_string(child) +
                                           ") has died in step 5: " + said));
        });
  }
}

TEST_CASE("a kill for want of memory is told by the kernel's count") {
  const auto now = out_of_memory_kills();
  if (!now) {
    SUCCEED("this kernel does not count them");
    return;
  }
  CHECK(text_of_end(std::nullopt, now).empty());
  CHECK(text_of_end(SIGKILL, std::nullopt) ==
        ": it was killed by SIGKILL (out of memory? see dmesg)");
  CHECK(contains(text_of_end(SIGKILL, *now), "not by the kernel for want of memory"));
  CHECK(
      contains(text_of_end(SIGKILL, *now - 2), "out of memory? meanwhile the kernel has killed 2"));
  CHECK(text_of_end(3 << 8, now) == ": it ended with exit code 3");
}

TEST_CASE("the last operation of a rank is the round of deposits that it has begun") {
  Failure failure;
  run_shm_ranks({}, [&](ShmRank& self) {
    DepositRing ring(self.collectives, 4096, {});
    for (int round = 0; round < 3; ++round) {
      if (self.rank == 1 && round == 2) {
        until_asleep(self.group, 0);
        self.group.leave({});
        return;
      }
      ring.begin_round({.verb = Verb::kDeposit, .count = 64, .label = "gradients"},
                       std::chrono::seconds(20));
      ring.deposit(64);
      if (round == 1) self.group.show_deposit("layer.2.weight");
      if (round == 2) {
        failure = failure_of([&] { ring.wait("all_reduce of bucket 0"); });
        return;
      }
      until([&] { return ring.ready(64) == 64; });
      ring.collect(64);
    }
  });
  INFO(failure.text);
  CHECK(
      contains(failure.text,
               "its last operation: round 2 of deposits, the gradient of 'layer.2.weight' (rank"));
}

}  // namespace trireme::waits_test
