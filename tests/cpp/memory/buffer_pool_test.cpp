// Memory that is taken and given back all the time.

#include <trireme/memory/buffer_pool.h>

#include <c10/util/Exception.h>

#include <atomic>
#include <catch_torch.h>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

namespace trireme::buffer_pool_test {

using trireme::test::error_of;

namespace {

constexpr int64_t kBytes = 1 << 16;

}  // namespace

TEST_CASE("a block that was given back is taken again, for what fills at least half of it") {
  BufferPool pool(c10::kCPU);
  at::DataPtr block = pool.take(kBytes, "a");
  const void* const address = block.get();
  CHECK(reinterpret_cast<uintptr_t>(address) % 64 == 0);
  CHECK(block.device() == c10::Device(c10::kCPU));
  block.clear();
  block = pool.take(kBytes / 2, "b");
  CHECK(block.get() == address);
  block.clear();
  const at::DataPtr small = pool.take(kBytes / 2 - 1, "c");
  const at::DataPtr large = pool.take(kBytes + 1, "d");
  CHECK(small.get() != address);
  CHECK(large.get() != address);
  CHECK(pool.take(kBytes, "e").get() == address);
}

TEST_CASE("of several that fit the smallest is taken") {
  BufferPool pool(c10::kCPU);
  at::DataPtr large = pool.take(kBytes * 2, "large");
  at::DataPtr small = pool.take(kBytes + 64, "small");
  const void* const address = small.get();
  small.clear();
  large.clear();
  CHECK(pool.take(kBytes, "fits both").get() == address);
}

TEST_CASE("idle blocks can be given up, and fewer kept; those that are taken stay") {
  BufferPool pool(c10::kCPU);
  at::DataPtr taken = pool.take(kBytes, "taken");
  pool.take(kBytes, "idle").clear();
  pool.keep_idle(1);
  CHECK(pool.taken_bytes() == kBytes);
  const void* const address = taken.get();
  taken.clear();  // in place of the other
  CHECK(pool.take(kBytes, "again").get() == address);
  pool.keep_idle(0);
  at::DataPtr other = pool.take(4 * kBytes, "not that");
  CHECK(pool.taken_bytes() == 4 * kBytes);
}

TEST_CASE("a tensor gives its block back when its last user goes") {
  BufferPool pool(c10::kCPU);
  at::Tensor tensor = pool.empty({4, 3}, at::kDouble, "a");
  CHECK(tensor.sizes() == at::IntArrayRef({4, 3}));
  CHECK(tensor.is_contiguous());
  CHECK(tensor.scalar_type() == at::kDouble);
  CHECK(pool.taken_bytes() == 4 * 3 * 8);
  const void* const address = tensor.data_ptr();
  at::Tensor view = tensor.view({-1}).narrow(0, 3, 2);
  tensor.reset();
  CHECK(pool.taken_bytes() == 4 * 3 * 8);
  tensor = pool.empty({0, 3}, at::kFloat, "nothing");
  CHECK(tensor.numel() == 0);
  view.reset();
  CHECK(pool.empty({12}, at::kDouble, "again").data_ptr() == address);
}

TEST_CASE("counts what is taken, with the whole of a block that was used again") {
  BufferPool pool(c10::kCPU);
  CHECK(pool.taken_bytes() == 0);
  at::DataPtr first = pool.take(kBytes, "first");
  at::DataPtr second = pool.take(kBytes * 3, "second");
  CHECK(pool.taken_bytes() == kBytes * 4);
  second.clear();
  CHECK(pool.taken_bytes() == kBytes);
  first.clear();
  CHECK(pool.taken_bytes() == 0);
  first = pool.take(kBytes / 2, "again");
  CHECK(pool.taken_bytes() == kBytes);
  CHECK(pool.most_taken_bytes() == kBytes * 4);
}

TEST_CASE("keeps as many idle blocks as it says, the last ones") {
  BufferPool pool(c10::kCPU);
  std::vector<at::DataPtr> blocks;
  std::vector<const void*> addresses;
  for (int64_t i = 0; i < BufferPool::kIdle + 1; ++i) {
    // Blocks have sizes that do not stand in for each other.
    blocks.push_back(pool.take(kBytes << (2 * i), "block"));
    addresses.push_back(blocks.back().get());
  }
  for (at::DataPtr& block : blocks) block.clear();
  for (int64_t i = 1; i < BufferPool::kIdle + 1; ++i)
    CHECK(pool.take(kBytes << (2 * i), "again").get() == addresses[static_cast<size_t>(i)]);
}

TEST_CASE("a block may outlive its pool") {
  at::DataPtr block;
  {
    BufferPool pool(c10::kCPU);
    block = pool.take(kBytes, "a");
  }
  std::memset(block.get(), 1, kBytes);
  CHECK(static_cast<const char*>(block.get())[kBytes - 1] == 1);
  block.clear();
}

TEST_CASE("several threads take and give back, and no block is two threads'") {
  BufferPool pool(c10::kCPU);
  std::atomic<int64_t> mixed_up{0};
  std::vector<std::thread> threads;
  for (int64_t number = 0; number < 4; ++number) {
    threads.emplace_back([&, number] {
      for (int64_t turn = 0; turn < 500; ++turn) {
        const int64_t bytes = 256 << (turn % 3);
        const at::DataPtr block = pool.take(bytes, "a turn");
        auto* data = static_cast<char*>(block.get());
        std::memset(data, static_cast<int>(number), static_cast<size_t>(bytes));
        std::this_thread::yield();
        for (int64_t i = 0; i < bytes; ++i) mixed_up += data[i] != number;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(mixed_up == 0);
  CHECK(pool.taken_bytes() == 0);
}

TEST_CASE("blocks come from a source of one's own; idle ones of another source are not used") {
  BufferPool pool(c10::kCPU);
  pool.take(kBytes, "a").clear();
  std::vector<int64_t> asked;
  pool.set_source([&](int64_t bytes) {
    asked.push_back(bytes);
    return c10::GetAllocator(c10::kCPU)->allocate(static_cast<size_t>(bytes));
  });
  pool.take(kBytes, "b").clear();
  pool.take(kBytes, "c").clear();
  CHECK(asked == std::vector<int64_t>{kBytes});
  pool.set_source({});
  const at::DataPtr block = pool.take(kBytes, "d");
  CHECK(asked.size() == 1);
  CHECK(pool.taken_bytes() == kBytes);
}

TEST_CASE("where there is no memory the error says how much was needed, and for what") {
  BufferPool pool(c10::kCPU);
  const at::DataPtr held = pool.take(kBytes, "a");
  const std::string said = error_of<c10::OutOfMemoryError>(
      [&] { pool.take(std::numeric_limits<int64_t>::max() / 2, "unit block.3"); });
  CHECK_THAT(said, Catch::Contains("[buffer_pool] got no memory for 4611686018427387903 bytes of "
                                   "unit block.3 on cpu beside 65536 that are taken"));
  CHECK_THAT(said, Catch::Contains("Make units smaller"));
  CHECK(pool.taken_bytes() == kBytes);
}

}  // namespace trireme::buffer_pool_test
