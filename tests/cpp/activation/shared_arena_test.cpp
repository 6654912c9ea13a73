// Blocks that ranks of a host share, in few segments.

#include <trireme/activation/shared_arena.h>

#include <torch/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread_ranks.h>
#include <vector>

#include "catch_torch.h"

namespace trireme::shared_arena_test {

TEST_CASE("an arena gives a place again once all ranks have let go, and joins what is free") {
  std::vector<std::string> results(2);
  const auto rank_main = [&](test::ThreadRank& rank) {
    constexpr int64_t kMiB = int64_t{1} << 20;
    SharedArena arena(*rank.communicator);
    uint64_t number = 0;
    const auto next = [&](int64_t bytes) {
      SharedArena::Place place;
      if (rank.where.rank == 0) place = arena.find_place(bytes);
      torch::Tensor numbers = torch::tensor(
          {place.slot, place.offset, place.bytes, place.grows, place.dropped}, torch::kLong);
      rank.communicator->broadcast({numbers}, 0, "place").wait();
      const auto* of = numbers.const_data_ptr<int64_t>();
      return arena.take({of[0], of[1], of[2], of[3], of[4]}, ++number, "block");
    };
    const auto meet = [&] { rank.communicator->barrier("between").wait(); };
    std::string wrong;
    const auto check = [&](bool is_right, const char* what) { wrong += is_right ? "" : what; };
    auto a = next(kMiB);
    auto b = next(kMiB);
    auto c = next(kMiB);
    std::byte* place_of_a = a->data();
    check(arena.bytes() == 4 * kMiB, "bytes of the first segment; ");
    if (rank.where.rank == 0) a.reset();
    meet();
    auto d = next(kMiB / 2);
    check(d->data() != place_of_a, "taken before all have let go; ");
    a.reset();
    b.reset();
    meet();
    auto e = next(2 * kMiB);
    check(e->data() == place_of_a, "free neighbours are not joined; ");
    check(arena.bytes() == 4 * kMiB, "bytes of one segment; ");
    c.reset();
    d.reset();
    e.reset();
    meet();
    auto f = next(6 * kMiB);
    check(arena.bytes() == 6 * kMiB + 128 || arena.bytes() == 6 * kMiB + 64, "what is free goes; ");
    f->data()[0] = std::byte{1};
    auto none = next(int64_t{1} << 50);
    check(none == nullptr, "a block of a petabyte; ");
    auto g = next(kMiB);
    check(g != nullptr && f->data()[0] == std::byte{1}, "goes on without; ");
    results[static_cast<size_t>(rank.where.rank)] = wrong;
  };
  test::run_thread_ranks(2, rank_main, std::chrono::seconds(30), test::Engine::kShm);
  CHECK(results == std::vector<std::string>(2));
}

}  // namespace trireme::shared_arena_test
