// Every collective against what it should give, ranks as threads: small integers, so that sums are
// exact in whatever order.

#include <catch2/catch.hpp>
#include <numeric>
#include <random>
#include <shm/shm_ranks.h>
#include <vector>

namespace trireme::collectives_test {

using namespace trireme::shm;
using namespace trireme::shm::test;

namespace {

// Long values repeat after this many elements, and are copied and compared as bytes: element by
// element, these tests would take ten times as long under ThreadSanitizer.
constexpr size_t kPeriod = 101;

float value_of(int64_t rank, size_t i) {
  return static_cast<float>((static_cast<size_t>(rank) * 7 + i * 3) % kPeriod);
}

// Element i is value(i), which has that period.
template <typename Value>
std::vector<float> repeated(size_t numel, const Value& value) {
  std::vector<float> periods(std::min(numel, 64 * kPeriod)), values;
  for (size_t i = 0; i < periods.size(); ++i) periods[i] = value(i);
  values.reserve(numel);
  while (values.size() < numel) {
    const size_t more = std::min(numel - values.size(), periods.size());
    values.insert(values.end(), periods.data(), periods.data() + more);
  }
  return values;
}

std::vector<float> floats_of(int64_t rank, size_t numel) {
  return repeated(numel, [&](size_t i) { return value_of(rank, i); });
}

std::vector<float> sum_of(int64_t world, size_t numel) {
  return repeated(numel, [&](size_t i) {
    float sum = 0;
    for (int64_t rank = 0; rank < world; ++rank) sum += value_of(rank, i);
    return sum;
  });
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// ThreadSanitizer spends its time on fresh memory: it gets one ring and a piece of the next, where
// others get several rings.
#ifdef __SANITIZE_THREAD__
constexpr size_t kMost = 1'100'003, kMostAtRandom = 150'000;
#else
constexpr size_t kMost = 3'000'017, kMostAtRandom = 700'000;
#endif

// Around what one chunk, one slice, one ring and the flat form hold.
const std::vector<size_t> kNumels = {0, 1, 3, 17, 4096, 4097, 100'003, 131'072, 500'001, kMost};

}  // namespace

TEST_CASE("all_reduce: every rank gets the same sum") {
  for (const int64_t world : {1, 2, 3, 5, 8}) {
    std::vector<int> wrong(static_cast<size_t>(world));
    run_shm_ranks({world}, [&](ShmRank& self) {
      for (const size_t numel : kNumels) {
        std::vector<float> values = floats_of(self.rank, numel);
        self.collectives.all_reduce(pieces_of(values), {}, {});
        wrong[static_cast<size_t>(self.rank)] += !same(values, sum_of(world, numel));
      }
    });
    CHECK(wrong == std::vector<int>(wrong.size()));
  }
}

TEST_CASE("all_reduce takes a list of tensors without flattening it") {
  std::vector<int> wrong(3);
  run_shm_ranks({3}, [&](ShmRank& self) {
    std::mt19937 random(7);
    const std::vector<float> own = floats_of(self.rank, 30 * 50'000), sum = sum_of(3, own.size());
    for (int round = 0; round < 20; ++round) {
      std::vector<std::vector<float>> tensors, expected;
      Pieces pieces;
      ptrdiff_t begin = 0;
      for (int t = 0; t < 30; ++t) {
        const ptrdiff_t end = begin + random() % (round % 2 == 0 ? 100 : 50'000);
        tensors.emplace_back(own.begin() + begin, own.begin() + end);
        expected.emplace_back(sum.begin() + begin, sum.begin() + end);
        pieces.add({reinterpret_cast<std::byte*>(tensors.back().data()),
                    (end - begin) * static_cast<int64_t>(sizeof(float))});
        begin = end;
      }
      self.collectives.all_reduce(pieces, {}, {});
      for (size_t t = 0; t < tensors.size(); ++t)
        wrong[static_cast<size_t>(self.rank)] += !same(tensors[t], expected[t]);
    }
  });
  CHECK(wrong == std::vector<int>(3));
}

TEST_CASE("reduce leaves the memory of all but the root alone") {
  std::vector<int> wrong(3);
  run_shm_ranks({3}, [&](ShmRank& self) {
    for (const size_t numel : kNumels) {
      for (const int64_t root : {0, 2}) {
        std::vector<float> values = floats_of(self.rank, numel);
        self.collectives.reduce(pieces_of(values), root, {}, {});
        const auto expected = self.rank == root ? sum_of(3, numel) : floats_of(self.rank, numel);
        wrong[static_cast<size_t>(self.rank)] += !same(values, expected);
      }
    }
  });
  CHECK(wrong == std::vector<int>(3));
}

TEST_CASE("averages and sums with a factor per rank") {
  std::vector<int> wrong(4);
  run_shm_ranks({4}, [&](ShmRank& self) {
    for (const size_t numel : {5, 200'000}) {
      std::vector<float> average = floats_of(self.rank, numel);
      self.collectives.all_reduce(pieces_of(average), {Dtype::kF32, ReduceOp::kAvg}, {});
      std::vector<float> scaled = floats_of(self.rank, numel);
      const double factor = static_cast<double>(self.rank + 1);
      self.collectives.all_reduce(pieces_of(scaled), {Dtype::kF32, ReduceOp::kPremulSum, factor},
                                  {});
      const auto weighted = repeated(numel, [](size_t i) {
        float sum = 0;
        for (int64_t rank = 0; rank < 4; ++rank)
          sum += value_of(rank, i) * static_cast<float>(rank + 1);
        return sum;
      });
      std::vector<float> mean = sum_of(4, kPeriod);
      for (float& value : mean) value /= 4;
      const auto expected = repeated(numel, [&](size_t i) { return mean[i % kPeriod]; });
      wrong[static_cast<size_t>(self.rank)] += !same(average, expected) || !same(scaled, weighted);
    }
  });
  CHECK(wrong == std::vector<int>(4));
}

TEST_CASE("reduce_scatter with a size per rank, in place and not") {
  for (const int64_t world : {1, 2, 3, 5}) {
    std::vector<int> wrong(static_cast<size_t>(world));
    run_shm_ranks({world}, [&](ShmRank& self) {
      for (const size_t numel : kNumels) {
        for (const bool in_place : {false, true}) {
          std::vector<std::vector<float>> inputs;
          std::vector<Pieces> pieces;
          for (int64_t owner = 0; owner < world; ++owner)
            inputs.push_back(floats_of(self.rank, numel / static_cast<size_t>(owner + 1)));
          for (auto& input : inputs) pieces.push_back(pieces_of(input));
          const auto own = static_cast<size_t>(self.rank);
          std::vector<float> output(inputs[own].size());
          self.collectives.reduce_scatter(in_place ? pieces[own] : pieces_of(output), pieces, {},
                                          {});
          wrong[own] += !same(in_place ? inputs[own] : output, sum_of(world, output.size()));
        }
      }
    });
    CHECK(wrong == std::vector<int>(wrong.size()));
  }
}

TEST_CASE("all_gather, gather and scatter with their sizes") {
  for (const int64_t world : {1, 2, 3, 5}) {
    std::vector<int> wrong(static_cast<size_t>(world));
    run_shm_ranks({world}, [&](ShmRank& self) {
      const auto own = static_cast<size_t>(self.rank);
      for (const size_t numel : kNumels) {
        std::vector<std::vector<float>> outputs;
        std::vector<Pieces> pieces;
        for (int64_t source = 0; source < world; ++source)
          outputs.emplace_back(numel / static_cast<size_t>(source + 1), -1.0F);
        for (auto& output : outputs) pieces.push_back(pieces_of(output));
        std::vector<float> input = floats_of(self.rank, outputs[own].size());
        self.collectives.all_gather(pieces, pieces_of(input), Dtype::kF32, {});
        for (int64_t source = 0; source < world; ++source) {
          const auto& output = outputs[static_cast<size_t>(source)];
          wrong[own] += !same(output, floats_of(source, output.size()));
        }

        const int64_t root = world - 1;
        std::vector<std::vector<float>> parts(static_cast<size_t>(world),
                                              std::vector<float>(numel));
        pieces.clear();
        for (auto& part : parts) pieces.push_back(pieces_of(part));
        std::vector<float> mine = floats_of(self.rank, numel);
        const bool is_root = self.rank == root;
        self.collectives.gather(is_root ? pieces : std::vector<Pieces>{}, pieces_of(mine), root,
                                Dtype::kF32, {});
        for (int64_t source = 0; is_root && source < world; ++source)
          wrong[own] += !same(parts[static_cast<size_t>(source)], floats_of(source, numel));
        std::vector<float> back(numel);
        self.collectives.scatter(pieces_of(back), is_root ? pieces : std::vector<Pieces>{}, root,
                                 Dtype::kF32, {});
        wrong[own] += !same(back, mine);
      }
    });
    CHECK(wrong == std::vector<int>(wrong.size()));
  }
}

TEST_CASE("broadcast from every root") {
  std::vector<int> wrong(4);
  run_shm_ranks({4}, [&](ShmRank& self) {
    for (const size_t numel : kNumels) {
      for (int64_t root = 0; root < 4; ++root) {
        std::vector<float> values = floats_of(self.rank, numel);
        self.collectives.broadcast(pieces_of(values), root, Dtype::kF32, {});
        wrong[static_cast<size_t>(self.rank)] += !same(values, floats_of(root, numel));
      }
    }
  });
  CHECK(wrong == std::vector<int>(4));
}

TEST_CASE("all_to_all with a size per pair") {
  for (const int64_t world : {1, 2, 5}) {
    std::vector<int> wrong(static_cast<size_t>(world));
    run_shm_ranks({world}, [&](ShmRank& self) {
      for (const size_t scale : {0, 1, 1000, 90'000}) {
        const auto numel = [&](int64_t from, int64_t to) {
          return scale * static_cast<size_t>((from * 3 + to * 2) % 5);
        };
        std::vector<std::vector<float>> inputs, outputs;
        for (int64_t peer = 0; peer < world; ++peer) {
          inputs.push_back(floats_of(self.rank * 10 + peer, numel(self.rank, peer)));
          outputs.emplace_back(numel(peer, self.rank));
        }
        std::vector<Pieces> in, out;
        for (auto& input : inputs) in.push_back(pieces_of(input));
        for (auto& output : outputs) out.push_back(pieces_of(output));
        self.collectives.all_to_all(out, in, Dtype::kF32, {});
        for (int64_t peer = 0; peer < world; ++peer) {
          const auto& output = outputs[static_cast<size_t>(peer)];
          wrong[static_cast<size_t>(self.rank)] +=
              !same(output, floats_of(peer * 10 + self.rank, output.size()));
        }
      }
    });
    CHECK(wrong == std::vector<int>(wrong.size()));
  }
}

TEST_CASE("a thousand collectives of random kinds and sizes, over groups of every size") {
  for (const int64_t world : {2, 3, 4, 6, 8}) {
    std::vector<int> wrong(static_cast<size_t>(world));
    run_shm_ranks({world}, [&](ShmRank& self) {
      std::mt19937 random(static_cast<unsigned>(world));
      const auto own = static_cast<size_t>(self.rank);
      for (int round = 0; round < 200; ++round) {
        const size_t limit = round % 10 == 0 ? kMostAtRandom : round % 3 == 0 ? 20'000 : 64;
        const size_t numel = random() % limit;
        const auto root = static_cast<int64_t>(random() % static_cast<size_t>(world));
        std::vector<float> values = floats_of(self.rank, numel);
        switch (random() % 4) {
          case 0:
            self.collectives.all_reduce(pieces_of(values), {}, {});
            wrong[own] += !same(values, sum_of(world, numel));
            break;
          case 1:
            self.collectives.broadcast(pieces_of(values), root, Dtype::kF32, {});
            wrong[own] += !same(values, floats_of(root, numel));
            break;
          case 2:
            self.collectives.barrier({});
            break;
          default: {
            std::vector<float> output(numel);
            std::vector<Pieces> inputs(static_cast<size_t>(world), pieces_of(values));
            self.collectives.reduce_scatter(pieces_of(output), inputs, {}, {});
            wrong[own] += !same(output, sum_of(world, numel));
          }
        }
      }
    });
    CHECK(wrong == std::vector<int>(wrong.size()));
  }
}

}  // namespace trireme::collectives_test
