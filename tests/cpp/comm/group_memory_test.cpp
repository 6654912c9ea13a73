// Memory of a group's own backend.

#include <trireme/comm/group_memory.h>

#include <trireme/memory/buffer_pool.h>

#include <catch_torch.h>
#include <cstring>
#include <thread_ranks.h>
#include <vector>

namespace trireme::group_memory_test {

using trireme::test::Engine;
using trireme::test::run_thread_ranks;
using trireme::test::ThreadRank;

TEST_CASE(
    "a pool takes its blocks from a backend that has memory, and says what it needed them for") {
  std::vector<int64_t> sums(2);
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        BufferPool pool(c10::kCPU);
        int64_t taken = 0;
        pool.set_source([&taken, source = memory_of(rank.group, c10::kCPU)](int64_t bytes) {
          taken += bytes;
          return source(bytes);
        });
        at::Tensor block = pool.empty({1024}, at::kFloat, "a unit");
        block.fill_(static_cast<float>(rank.where.rank + 1));
        rank.communicator->all_reduce({block}, ReduceOp::kSum, "block").wait();
        sums[static_cast<size_t>(rank.where.rank)] = block[1023].item<int64_t>() + taken;
        block.reset();
        rank.communicator->barrier("before memory goes").wait();
      },
      std::chrono::seconds(20), Engine::kShm);
  CHECK(sums == std::vector<int64_t>{3 + 4096, 3 + 4096});
}

TEST_CASE("Gloo has none") {
  std::vector<int> has_memory(2, 1);
  run_thread_ranks(2, [&](ThreadRank& rank) {
    has_memory[static_cast<size_t>(rank.where.rank)] =
        memory_of(rank.group, c10::kCPU) != nullptr ? 1 : 0;
  });
  CHECK(has_memory == std::vector<int>{0, 0});
}

}  // namespace trireme::group_memory_test
