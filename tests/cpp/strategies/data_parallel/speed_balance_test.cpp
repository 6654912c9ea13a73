#include <trireme/strategies/data_parallel/speed_balance.h>

#include <catch_torch.h>
#include <vector>

namespace trireme::speed_balance_test {

namespace {

// A batch after the other, on replicas that need so many milliseconds per row.
std::vector<Chunk> balanced(const std::vector<double>& ms_per_row, int64_t rows, int64_t steps) {
  SpeedBalance balance(ms_per_row.size());
  std::vector<Chunk> chunks;
  for (int64_t step = 0; step < steps; ++step) {
    chunks = weighted_chunks(rows, balance.weights());
    std::vector<double> milliseconds;
    for (const Chunk& chunk : chunks)
      milliseconds.push_back(static_cast<double>(chunk.rows) * ms_per_row[chunk.replica]);
    balance.record(chunks, milliseconds);
  }
  return chunks;
}

}  // namespace

TEST_CASE("shares stay equal until something is known") {
  CHECK((balanced({1, 3}, 8, 1) == std::vector<Chunk>{{0, 4}, {1, 4}}));
  CHECK(SpeedBalance(3).weights() == std::vector<double>{1, 1, 1});
}

TEST_CASE("the faster replica gets more, so that both take the same time") {
  CHECK((balanced({1, 3}, 16, 10) == std::vector<Chunk>{{0, 12}, {1, 4}}));
  CHECK((balanced({2, 1, 1}, 10, 10) == std::vector<Chunk>{{0, 2}, {1, 4}, {2, 4}}));
}

TEST_CASE("a tremor moves nothing") {
  CHECK((balanced({1, 1.04}, 100, 50) == std::vector<Chunk>{{0, 50}, {1, 50}}));
}

TEST_CASE("a replica that becomes slow gives rows away") {
  SpeedBalance balance(2);
  std::vector<Chunk> chunks;
  for (int64_t step = 0; step < 60; ++step) {
    chunks = weighted_chunks(12, balance.weights());
    std::vector<double> milliseconds;
    for (const Chunk& chunk : chunks)
      milliseconds.push_back(static_cast<double>(chunk.rows) *
                             (step >= 20 && chunk.replica == 0 ? 2.0 : 1.0));
    balance.record(chunks, milliseconds);
    if (step == 19) CHECK((chunks == std::vector<Chunk>{{0, 6}, {1, 6}}));
  }
  CHECK((chunks == std::vector<Chunk>{{0, 4}, {1, 8}}));
}

TEST_CASE("steps in which a replica had no rows say nothing of it") {
  SpeedBalance balance(2);
  for (int64_t step = 0; step < 10; ++step) balance.record({{0, 4}}, {1.0});
  CHECK(balance.weights() == std::vector<double>{1, 1});
}

}  // namespace trireme::speed_balance_test
