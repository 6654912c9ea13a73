#include <trireme/strategies/pipeline/partition.h>

#include <algorithm>
#include <catch_torch.h>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

namespace trireme::partition_test {

using Catch::Contains;
using Sizes = std::vector<int64_t>;

namespace {

// Tells what the most costly part costs; infinity for one above the limit.
double largest(const PartitionRequest& request, const Sizes& sizes) {
  double most = 0;
  size_t layer = 0;
  for (const int64_t count : sizes) {
    double cost = 0;
    int64_t bytes = 0;
    for (const size_t end = layer + static_cast<size_t>(count); layer < end; ++layer) {
      cost += request.costs[layer];
      if (!request.memory.empty()) bytes += request.memory[layer];
    }
    if (request.limit && bytes > *request.limit) return std::numeric_limits<double>::infinity();
    most = std::max(most, cost);
  }
  return most;
}

// Tries every cut.
double best_of_all(const PartitionRequest& request, Sizes& sizes, int64_t left) {
  const auto parts_left = request.parts - static_cast<int64_t>(sizes.size());
  if (parts_left == 1) {
    sizes.push_back(left);
    const double found = largest(request, sizes);
    sizes.pop_back();
    return found;
  }
  double best = std::numeric_limits<double>::infinity();
  for (int64_t count = 1; count <= left - parts_left + 1; ++count) {
    sizes.push_back(count);
    best = std::min(best, best_of_all(request, sizes, left - count));
    sizes.pop_back();
  }
  return best;
}

}  // namespace

TEST_CASE("layers are cut where the largest part is least") {
  CHECK(partition({{1, 1, 1, 1, 1, 1, 1}, 3}) == Sizes{3, 2, 2});
  CHECK(partition({{5, 1, 1, 1, 1}, 2}) == Sizes{1, 4});
  CHECK(partition({{1, 1, 1, 1, 5}, 2}) == Sizes{4, 1});
  CHECK(partition({{0, 0, 0, 0, 0, 0}, 3}) == Sizes{2, 2, 2});
  CHECK(partition({{9, 1, 1, 1, 1, 1, 1, 1}, 4}) == Sizes{1, 3, 2, 2});  // ties: as even as it gets
  CHECK(partition({{3, 4}, 2}) == Sizes{1, 1});
  CHECK(partition({{3, 4}, 1}) == Sizes{2});
}

TEST_CASE("no cut is better than that of partition()") {
  std::mt19937 random(7);
  for (int round = 0; round < 400; ++round) {
    PartitionRequest request;
    const auto layers = 1 + random() % 9;
    for (size_t i = 0; i < layers; ++i) request.costs.push_back(random() % 20);
    request.parts = static_cast<int64_t>(1 + random() % layers);
    if (round % 2 == 1) {
      for (size_t i = 0; i < layers; ++i) request.memory.push_back(random() % 20);
      request.limit = 20 + static_cast<int64_t>(random() % 30);
    }
    Sizes tried;
    const double best = best_of_all(request, tried, static_cast<int64_t>(layers));
    if (best == std::numeric_limits<double>::infinity()) {
      CHECK_THROWS_WITH(partition(request), Contains("Raise the limit, or use more parts"));
      continue;
    }
    const Sizes sizes = partition(request);
    CHECK(std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) == static_cast<int64_t>(layers));
    CHECK(*std::min_element(sizes.begin(), sizes.end()) >= 1);
    CHECK(largest(request, sizes) == best);
  }
}

TEST_CASE("what cannot be cut into parts is refused") {
  CHECK_THROWS_WITH(partition({{1, 1}, 3}), Contains("got 2 layers for 3 parts"));
  CHECK_THROWS_WITH(partition({{1, 1}, 0}), Contains("got 2 layers for 0 parts"));
  CHECK_THROWS_WITH(partition({{1, -1}, 1}), Contains("for layer 1, expected a finite number"));
  CHECK_THROWS_WITH(partition({{1, 1}, 1, {1}, 5}), Contains("got bytes for 1 layers, expected 2"));
  CHECK_THROWS_WITH(partition({{1, 1}, 1, {}, 5}), Contains("got bytes for 0 layers, expected 2"));
  CHECK_THROWS_WITH(partition({{1, 1}, 1, {1, 1}}), Contains("bytes of layers without a limit"));
  CHECK_THROWS_WITH(partition({{1, 1}, 2, {1, 6}, 5}), Contains("got layer 1 of 6 bytes"));
  CHECK_THROWS_WITH(partition({{1, 1, 1}, 2, {3, 3, 3}, 5}),
                    Contains("got layers 0 to 2 for 2 parts, expected at least 3 parts of at"));
}

}  // namespace trireme::partition_test
