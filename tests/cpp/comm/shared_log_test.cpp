// Appends texts from several threads at once, and reads them in one order.

#include <trireme/comm/shared_log.h>

#include <atomic>
#include <catch_torch.h>
#include <string>
#include <thread>
#include <thread_ranks.h>
#include <vector>

namespace trireme::shared_log_test {

using trireme::test::Engine;
using trireme::test::run_thread_ranks;
using trireme::test::ThreadRank;
using Texts = std::vector<std::string>;

namespace {

constexpr auto kTimeout = std::chrono::seconds(30);

// Every tenth text takes several slots.
std::string text_of(int64_t rank, int64_t number) {
  const std::string name = std::to_string(rank) + " " + std::to_string(number) + " ";
  return name + std::string(number % 10 == 3 ? 1500 : 20, static_cast<char>('a' + number % 26));
}

// Appends as fast as it can, and reads in between.
Texts append_and_read(SharedLog& log, int64_t rank, int64_t world, int64_t each) {
  Texts read;
  const auto take = [&] {
    while (auto entry = log.take())
      read.push_back(std::to_string(entry->from) + ": " + entry->text);
  };
  for (int64_t number = 0; number < each; ++number) {
    log.append(text_of(rank, number));
    log.wake_others(false);
    if (number % 7 == rank) take();
  }
  while (static_cast<int64_t>(read.size()) < world * each || log.has_unposted()) {
    log.post();
    take();
    std::this_thread::yield();
  }
  return read;
}

}  // namespace

TEST_CASE("All ranks read what all have appended in one order", "[shared_log]") {
  constexpr int64_t kWorld = 3;
  constexpr int64_t kEach = 1200;  // more than the log holds
  std::vector<Texts> read(kWorld);
  run_thread_ranks(
      kWorld,
      [&](ThreadRank& self) {
        auto log = SharedLog::make(*self.communicator);
        const auto rank = self.where.rank;
        if (log) read[static_cast<size_t>(rank)] = append_and_read(*log, rank, kWorld, kEach);
      },
      kTimeout, Engine::kShm);
  REQUIRE(read[0].size() == kWorld * kEach);
  CHECK(read[1] == read[0]);
  CHECK(read[2] == read[0]);
  for (int64_t rank = 0; rank < kWorld; ++rank) {
    const std::string from = std::to_string(rank) + ": ";
    int64_t number = 0;
    for (const std::string& text : read[0])
      if (text.starts_with(from)) CHECK(text == from + text_of(rank, number++));
    CHECK(number == kEach);
  }
}

TEST_CASE("A reader asleep is woken by what others append", "[shared_log]") {
  std::atomic<bool> came = false;
  run_thread_ranks(
      2,
      [&](ThreadRank& self) {
        auto log = SharedLog::make(*self.communicator);
        if (!log) return;
        if (self.where.rank == 0) {
          log->append("a text");
          log->wake_others(false);
        } else {
          log->set_reader(SharedLog::Reader::kBeside);
          const shm::FutexWait wait(log->futex_of(SharedLog::Reader::kBeside));
          came = wait.until([&] { return log->take().has_value(); });
        }
      },
      kTimeout, Engine::kShm);
  CHECK(came);
}

TEST_CASE("Ranks without shared memory have no log", "[shared_log]") {
  std::atomic<int> logs = 0;
  run_thread_ranks(2, [&](ThreadRank& self) {
    if (SharedLog::make(*self.communicator)) ++logs;
  });
  CHECK(logs == 0);
}

}  // namespace trireme::shared_log_test
