// What ranks tell each other behind their gradients: counts of uses, a change, a number to compare.

#include <trireme/grad/used_map.h>

#include <ATen/ATen.h>

#include <catch_torch.h>
#include <cstdint>
#include <utility>
#include <vector>

namespace trireme::used_map_test {

namespace {

struct Rank {
  int64_t number = 0;
  bool has_changed = false;
};

// What all read whose groups of `among` ranks compare numbers.
UsedMap sum_of(const std::vector<Rank>& ranks, int64_t among) {
  const auto world = static_cast<int64_t>(ranks.size());
  at::Tensor sums = at::zeros({3});
  std::vector<UsedMap> maps;
  maps.reserve(ranks.size());
  for (int64_t rank = 0; rank < world; ++rank) {
    UsedMap& own = maps.emplace_back(2);
    own.mark_used(rank % 2);
    if (ranks[static_cast<size_t>(rank)].has_changed) own.mark_changed();
    const int64_t share = rank % among + 1 < among ? 1 : 1 - among;
    own.compare(ranks[static_cast<size_t>(rank)].number, share, world);
    at::Tensor transport = at::empty({3});
    own.write_to(transport, /*shadow=*/false);
    sums += transport;
  }
  maps.front().start_reading(sums);
  maps.front().finish_reading();
  return std::move(maps.front());
}

}  // namespace

TEST_CASE("ranks compare numbers in the place of the flag, which still says what it did") {
  for (const int64_t world : {2, 3, 8, 64, 512, 1400}) {
    CAPTURE(world);
    std::vector<Rank> ranks(static_cast<size_t>(world), Rank{0xabcdef});
    CHECK(!sum_of(ranks, world).numbers_differ());
    CHECK(!sum_of(ranks, world).changed_anywhere());
    CHECK(sum_of(ranks, world).ranks_using(0) == (world + 1) / 2);
    ranks.back().has_changed = true;
    CHECK(sum_of(ranks, world).changed_anywhere());
    CHECK(!sum_of(ranks, world).numbers_differ());
    for (Rank& rank : ranks) rank.has_changed = true;
    CHECK(sum_of(ranks, world).changed_anywhere());
    CHECK(!sum_of(ranks, world).numbers_differ());
    for (const size_t other : {size_t{0}, ranks.size() / 2, ranks.size() - 1}) {
      std::vector<Rank> differing = ranks;
      ++differing[other].number;
      CHECK(sum_of(differing, world).numbers_differ());
      CHECK(sum_of(differing, world).changed_anywhere());
    }
  }
}

TEST_CASE("only ranks of one group compare numbers; more than fp32 can tell apart do not") {
  CHECK(!sum_of({{7}, {7}, {9}, {9}}, 2).numbers_differ());
  CHECK(sum_of({{7}, {7}, {9}, {8}}, 2).numbers_differ());
  CHECK(sum_of({{7}, {7}, {9}, {9}}, 4).numbers_differ());
  std::vector<Rank> many(2000);
  many[7] = {1, true};
  CHECK(!sum_of(many, 2000).numbers_differ());
  CHECK(sum_of(many, 2000).changed_anywhere());
}

}  // namespace trireme::used_map_test
