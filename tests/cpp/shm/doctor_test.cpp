// Who is where, seen from outside.

#include <trireme/shm/doctor.h>

#include <trireme/shm/deposit_ring.h>

#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <csignal>
#include <cstring>
#include <new>
#include <shm/two_processes.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

namespace trireme::doctor_test {

using namespace trireme::shm;
using namespace trireme::shm::test;
using std::chrono::milliseconds;

namespace {

// The group of this process, once its verdict has that part, or after twenty seconds.
SeenGroup examine_until(std::string_view part, ExamineRequest request = {}) {
  request.pids = {::getpid()};
  SeenGroup seen;
  for (int i = 0; i < 2000; ++i) {
    const Examination found = examine_host(request);
    if (found.groups.size() == 1) seen = found.groups.front();
    if (contains(seen.verdict, part)) break;
    ::usleep(10'000);
  }
  return seen;
}

SeenOperation operation(uint64_t sequence, double started_s_ago, bool is_finished) {
  SeenOperation made{sequence, "barrier", started_s_ago, std::nullopt};
  if (is_finished) made.finished_s_ago = started_s_ago / 2;
  return made;
}

SeenRank rank_at(int64_t rank, const SeenOperation& last, std::string process = "sleeping") {
  SeenRank seen;
  seen.rank = rank;
  seen.world = seen.members = 2;
  seen.pid = static_cast<pid_t>(100 + rank);
  seen.process = std::move(process);
  seen.state = RankState::kHere;
  seen.group = {1, 2};
  seen.operations = {last};
  return seen;
}

SeenRank on_errand(SeenRank rank, double seconds) {
  rank.context = "all_reduce of bucket 3";
  rank.wait_s = seconds;
  return rank;
}

SeenGroup judged(std::vector<SeenRank> ranks) {
  SeenGroup group;
  group.ranks = std::move(ranks);
  judge(group, std::chrono::seconds(5));
  return group;
}

}  // namespace

TEST_CASE("the doctor names a process that is stopped in front of a collective") {
  run_two_processes(
      [](ShmRank& self) {
        sum(self.collectives, 5);
        ::raise(SIGSTOP);
        sum(self.collectives, 7, "bucket 3");
      },
      [](ShmRank& self, pid_t child) {
        sum(self.collectives, 5);
        ::waitpid(child, nullptr, WUNTRACED);
        std::thread waits([&] { sum(self.collectives, 7, "bucket 3"); });
        const SeenGroup seen = examine_until("waits in it");
        ::kill(child, SIGCONT);
        waits.join();
        INFO(seen.verdict);
        CHECK(contains(seen.verdict,
                       "rank 1 (process " + std::to_string(child) +
                           ", stopped) has not entered collective 2, all_reduce of 7 float32 by "
                           "SUM 'bucket 3'; rank 0 waits in it for "));
        CHECK_FALSE(seen.is_well);
        REQUIRE(seen.ranks.size() == 2);
        CHECK(seen.ranks[0].behind == 0);
        CHECK(seen.ranks[1].behind == 1);
        CHECK(seen.ranks[1].sequence() == 1);
        CHECK(seen.ranks[1].operations[0].finished_s_ago.has_value());
      });
}

TEST_CASE("the doctor reads what a killed process was at, from those that outlive it") {
  for (const ReadThrough way : {ReadThrough::kMemory, ReadThrough::kFilesAlone}) {
    run_two_processes(
        [](ShmRank& self) {
          for (int i = 0; i < 70; ++i) sum(self.collectives, 5);
          ::raise(SIGKILL);
        },
        [way](ShmRank& self, pid_t child) {
          for (int i = 0; i < 70; ++i) sum(self.collectives, 5);
          siginfo_t ended{};
          ::waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOWAIT);
          ExamineRequest request;
          request.way = way;
          request.history = 100;
          const SeenGroup seen = examine_until("", request);
          INFO(seen.verdict);
          CHECK_FALSE(seen.is_well);
          if (way == ReadThrough::kFilesAlone) {  // only the dead one had its block as a file
            CHECK(contains(seen.verdict, "of 2 ranks on this host 1 cannot be read"));
            return;
          }
          CHECK(contains(seen.verdict, "rank 1 (process " + std::to_string(child) +
                                           ", gone) has died: it has finished collective 70, "));
          REQUIRE(seen.ranks.size() == 2);
          CHECK(seen.ranks[1].operations.size() == kRecords);
          CHECK(seen.ranks[1].operations.back().sequence == 7);
        });
  }
}

TEST_CASE("two groups of one process are told apart, and one that fails says why") {
  MemoryExchange first, second;
  const auto join = [](MemoryExchange& exchange, std::vector<std::unique_ptr<HostGroup>>& groups) {
    std::vector<std::thread> threads;
    groups.resize(2);
    for (int64_t rank = 0; rank < 2; ++rank)
      threads.emplace_back([&, rank] {
        groups[static_cast<size_t>(rank)] = HostGroup::join(exchange, {{rank, 2}});
      });
    for (std::thread& thread : threads) thread.join();
  };
  std::vector<std::unique_ptr<HostGroup>> one, two;
  join(first, one);
  join(second, two);
  two[1]->fail("the disk is full\x1b[2J");
  const Examination found = examine_host({.pids = {::getpid()}});
  REQUIRE(found.groups.size() == 2);
  for (const SeenGroup& group : found.groups) CHECK(group.ranks.size() == 2);
  const bool first_is_well = found.groups[0].is_well;
  CHECK(first_is_well != found.groups[1].is_well);
  CHECK(found.groups[first_is_well ? 0 : 1].verdict == "no collective has begun");
  CHECK(contains(found.groups[first_is_well ? 1 : 0].verdict, ") says: the disk is full?[2J"));
}

TEST_CASE("who waits for deposits is named with what it waits for, and who does not wait") {
  const SeenRank done = rank_at(1, operation(8, 9, true));
  const SeenGroup early = judged({on_errand(rank_at(0, operation(8, 9, true)), 4), done});
  CHECK(early.is_well);
  const SeenGroup late = judged({on_errand(rank_at(0, operation(8, 9, true)), 6), done});
  CHECK_FALSE(late.is_well);
  CHECK(late.verdict ==
        "rank 0 waits for all_reduce of bucket 3 for 6.0 s; rank 1 (process 101, sleeping) does "
        "not");
  CHECK(late.suspects == std::vector<pid_t>{101});
}

TEST_CASE("the doctor sees a rank that waits for deposits") {
  SeenGroup seen;
  run_shm_ranks({2}, [&](ShmRank& self) {
    DepositRing ring(self.collectives, 1024, {});
    if (self.rank == 0) {
      ring.begin_round({.verb = Verb::kDeposit, .count = 64}, std::chrono::seconds(20));
      ring.deposit(static_cast<int64_t>(ring.room(64).size()));
      ring.wait("all_reduce of bucket 7");
    } else {
      ExamineRequest request;
      request.patience = milliseconds(50);
      seen = examine_until("waits for all_reduce of bucket 7", request);
      ring.begin_round({.verb = Verb::kDeposit, .count = 64}, std::chrono::seconds(20));
      ring.deposit(static_cast<int64_t>(ring.room(64).size()));
    }
  });
  CHECK_FALSE(seen.is_well);
  CHECK(contains(seen.verdict, "rank 0 waits for all_reduce of bucket 7 for"));
}

TEST_CASE("a verdict names who holds up whom, and only after some patience") {
  const auto verdict = [](std::vector<SeenRank> ranks) { return judged(std::move(ranks)); };
  const SeenGroup early =
      verdict({rank_at(0, operation(9, 4, false)), rank_at(1, operation(8, 4, true))});
  CHECK(early.is_well);
  CHECK(early.verdict == "rank 0 is inside collective 9, barrier, for 4.0 s");

  const SeenGroup late =
      verdict({rank_at(0, operation(9, 6, false)), rank_at(1, operation(8, 6, true), "running")});
  CHECK_FALSE(late.is_well);
  CHECK(late.verdict ==
        "rank 1 (process 101, running) has not entered collective 9, barrier; rank 0 waits in it "
        "for 6.0 s");

  const SeenGroup earlier =
      verdict({rank_at(0, operation(9, 120, false)), rank_at(1, operation(8, 130, false))});
  CHECK(earlier.verdict ==
        "rank 1 (process 101, sleeping) has not entered collective 9, barrier (it is inside "
        "collective 8, barrier); rank 0 waits in it for 120 s");

  CHECK(late.suspects == std::vector<pid_t>{101});
  SeenRank in_step = rank_at(1, operation(8, 6, true), "running");
  in_step.step = "in step 4";
  CHECK(contains(verdict({rank_at(0, operation(9, 6, false)), in_step}).verdict,
                 "rank 1 (process 101, running, in step 4) has not entered collective 9"));

  SeenRank ahead = rank_at(0, operation(9, 7, false));
  ahead.arrived = 5;
  const SeenGroup together = verdict({ahead, rank_at(1, operation(9, 6, false))});
  CHECK(together.verdict ==
        "ranks 0, 1 are inside collective 9, barrier for 7.0 s; rank 1 (process 101, sleeping) has "
        "contributed least");

  const SeenGroup dead =
      verdict({rank_at(0, operation(9, 1, false)), rank_at(1, operation(9, 1, false), "gone")});
  CHECK_FALSE(dead.is_well);
  CHECK(dead.verdict ==
        "rank 1 (process 101, gone) has died: it is inside collective 9, barrier; rank 0 waits in "
        "it for 1.0 s");

  const SeenGroup both = verdict(
      {rank_at(0, operation(9, 1, true), "stopped"), rank_at(1, operation(8, 1, true), "gone")});
  CHECK(both.verdict ==
        "rank 0 (process 100, stopped) has finished collective 9, barrier; rank 1 (process 101, "
        "gone) has died: it has not entered collective 9, barrier");

  SeenRank left = rank_at(1, operation(8, 60, true), "gone");
  left.state = RankState::kLeft;
  const SeenGroup alone = verdict({rank_at(0, operation(8, 60, true)), left});
  CHECK(alone.is_well);
  CHECK(alone.verdict ==
        "rank 1 has left; nobody is inside a collective; the last was collective 8, barrier");
}

TEST_CASE("what is no block of this layout is not read as one") {
  std::vector<std::byte> bytes(sizeof(RankBlock));
  CHECK_FALSE(read_block(bytes, 0, 1));
  auto* block = new (bytes.data()) RankBlock;
  const auto reads = [&] { return read_block(bytes, 1'000'000'000, 64).has_value(); };
  CHECK_FALSE(reads());  // before its owner has said who it is
  block->pid = 7;
  block->rank = 1;
  block->world = 2;
  CHECK(reads());
  block->state.store(static_cast<RankState>(77));
  CHECK_FALSE(reads());
  block->state.store(RankState::kHere);
  block->members = 3;
  CHECK_FALSE(reads());
  block->members = 2;
  block->records[5].sequence = 69;
  block->records[5].verb = static_cast<Verb>(200);
  block->records[5].dtype = static_cast<Dtype>(200);
  block->records[5].label_length = 255;
  block->records[5].started_ns = INT64_MIN;
  block->records[6].sequence = 69;  // not its place
  const auto seen = read_block(bytes, INT64_MAX, 64);
  REQUIRE(seen);
  CHECK(seen->operations.size() == 1);
  CHECK(seen->step.empty());
  block->progress.steps_begun.store(5);
  block->progress.steps_done.store(4);
  block->progress.rounds.store(UINT64_MAX);
  block->progress.deposits[3].sequence = UINT64_MAX;
  std::memset(block->progress.names.data(), '\x1b', sizeof(block->progress.names));
  const auto busy = read_block(bytes, INT64_MAX, 64);
  REQUIRE(busy);
  CHECK(busy->step == "in step 5");
  CHECK(busy->round == "round 18446744073709551615 of deposits, the gradient of '" +
                           std::string(block->progress.names[0].size(), '?') + "'");
  block->layout = 1;
  CHECK_FALSE(reads());
  bytes.pop_back();
  CHECK_FALSE(reads());
}

TEST_CASE("a process of another user is said to be hidden") {
  if (::geteuid() != 0) {
    SUCCEED("only the superuser can become somebody else");
    return;
  }
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child == 0) {
    if (::setuid(65534) != 0) ::_exit(2);
    const Examination found = examine_host({.pids = {parent}});
    const bool said =
        std::any_of(found.hidden.begin(), found.hidden.end(),
                    [&](const HiddenProcess& process) { return process.pid == parent; });
    ::_exit(found.groups.empty() && said ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  CHECK(status == 0);
}

TEST_CASE("a foreign memory object with our name is left alone") {
  const int64_t bytes = sizeof(RankBlock) + Segment::kHeaderBytes;
  const int fd = ::memfd_create(kMemoryName, MFD_CLOEXEC);
  REQUIRE(::ftruncate(fd, bytes) == 0);
  void* map =
      ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  REQUIRE(map != MAP_FAILED);
  std::memset(map, 0x5a, static_cast<size_t>(bytes));
  CHECK(examine_host({.pids = {::getpid()}}).groups.empty());
  ::munmap(map, static_cast<size_t>(bytes));
  ::close(fd);
}

TEST_CASE("only whole mappings of our segments are looked at") {
  const int64_t bytes = 8192 - Segment::kHeaderBytes;
  Mapping mapping;
  const std::string fits = "7f0000000000-7f0000002000 rw-s 00000000 00:01 77   ";
  CHECK(parse_mapping(fits + "/memfd:trireme (deleted)", bytes, mapping));
  CHECK(mapping.inode == 77);
  CHECK(mapping.begin == 0x7f0000000000);
  CHECK(parse_mapping(fits + "/dev/shm/trireme-00ff (deleted)", bytes, mapping));
  CHECK_FALSE(parse_mapping(fits + "/memfd:other (deleted)", bytes, mapping));
  CHECK_FALSE(parse_mapping(fits + "/memfd:trireme (deleted)", bytes + 4096, mapping));
  CHECK_FALSE(parse_mapping("7f00-", bytes, mapping));
  CHECK_FALSE(parse_mapping("/memfd:trireme (deleted)", bytes, mapping));
  CHECK_FALSE(parse_mapping("zz-7f rw-s 0 00:01 7 /memfd:trireme (deleted)", bytes, mapping));
}

}  // namespace trireme::doctor_test
