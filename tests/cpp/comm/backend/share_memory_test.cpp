// Memory that all ranks of a group map, as strategies get it.

#include <trireme/comm/host.h>
#include <trireme/common/cpus.h>
#include <trireme/shm/segment.h>

#include <algorithm>
#include <catch_torch.h>
#include <string>
#include <thread_ranks.h>
#include <vector>

namespace trireme::share_memory_test {

using trireme::test::Engine;
using trireme::test::run_thread_ranks;
using trireme::test::ThreadRank;

namespace {

constexpr auto kTimeout = std::chrono::seconds(30);

void barrier(ThreadRank& rank) { rank.communicator->barrier("between").wait(); }

}  // namespace

TEST_CASE("ranks of one host get the same memory, which outlives the group") {
  std::vector<std::shared_ptr<const shm::Segment>> segments(3);
  std::vector<std::string> why(3);
  run_thread_ranks(
      3,
      [&](ThreadRank& rank) {
        const auto own = static_cast<size_t>(rank.where.rank);
        SharedMemory memory = rank.communicator->host()->share_memory(10'000, "store");
        why[own] = memory.why_not;
        segments[own] = std::move(memory.segment);
        segments[own]->data()[own * 4999] = static_cast<std::byte>(own + 1);
      },
      kTimeout, Engine::kShm);
  CHECK(why == std::vector<std::string>(3));
  for (const auto& segment : segments) {
    CHECK(segment->bytes() == 10'000);
    CHECK(segment->data() != segments[segment == segments[0] ? 1 : 0]->data());
    for (size_t rank = 0; rank < 3; ++rank)
      CHECK(segment->data()[rank * 4999] == static_cast<std::byte>(rank + 1));
  }
}

TEST_CASE("without room all ranks get none and the reason, and the group goes on") {
  std::vector<std::string> why(2);
  std::vector<int> after(2);
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        const auto own = static_cast<size_t>(rank.where.rank);
        const SharedMemory none =
            rank.communicator->host()->share_memory(int64_t{1} << 50, "store");
        why[own] = none.segment ? "got it" : none.why_not;
        at::Tensor sum = at::ones({5});
        rank.communicator->all_reduce({sum}, ReduceOp::kSum, "sum").wait();
        after[own] = sum[4].item<int>() == 2 &&
                     rank.communicator->host()->share_memory(64, "store").segment != nullptr;
      },
      kTimeout, Engine::kShm);
  CHECK(after == std::vector<int>{1, 1});
  CHECK(why[0] == why[1]);
  CHECK_THAT(why[0], Catch::Contains("rank 0 says: ") &&
                         Catch::Contains("needs 1125899906842688 bytes, free are "));
}

TEST_CASE("ranks that share no host have none") {
  std::vector<int> has_host(2, 1);
  run_thread_ranks(2, [&](ThreadRank& rank) {
    has_host[static_cast<size_t>(rank.where.rank)] = rank.communicator->host() != nullptr;
  });
  CHECK(has_host == std::vector<int>(2, 0));
  CHECK(SharedMemory().why_not == "the ranks do not share the memory of one host");
}

TEST_CASE("ranks that ask for different memory raise, naming both; one that asks for none does") {
  std::vector<std::string> said(2), refused(2);
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        const auto own = static_cast<size_t>(rank.where.rank);
        try {
          rank.communicator->host()->share_memory(64 + rank.where.rank, "store of model a");
        } catch (const c10::DistBackendError& error) {
          said[own] = error.what_without_backtrace();
        }
        try {
          rank.communicator->host()->share_memory(0, "store");
        } catch (const c10::ValueError& error) {
          refused[own] = error.what_without_backtrace();
        }
        barrier(rank);
      },
      kTimeout, Engine::kShm);
  for (size_t rank = 0; rank < 2; ++rank) {
    CHECK_THAT(said[rank], Catch::Contains("share of 64 bytes with root 0 'store of model a'") &&
                               Catch::Contains("share of 65 bytes with root 0 'store of model a'"));
    CHECK_THAT(refused[rank], Catch::Contains("[communicator] share_memory got 0 bytes (rank " +
                                              std::to_string(rank) + " of 2)"));
  }
}

TEST_CASE("deposits are for ranks that take all CPUs, or for whoever insists") {
  bool by_itself = true;
  bool insisting = false;
  run_thread_ranks(
      1,
      [&](ThreadRank& rank) {
        by_itself = rank.communicator->host()->make_deposit_stream(4096, false) != nullptr;
        insisting = rank.communicator->host()->make_deposit_stream(4096, true) != nullptr;
      },
      kTimeout, Engine::kShm);
  CHECK(by_itself == (usable_cpus() == 1));
  CHECK(insisting);
}

}  // namespace trireme::share_memory_test
