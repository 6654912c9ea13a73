#include <trireme/strategies/data_parallel/chunk_plan.h>

#include <catch_torch.h>
#include <cmath>
#include <string>
#include <vector>

namespace trireme::chunk_plan_test {

namespace {

// Who gets each row: the number of its replica.
std::string drawn(const std::vector<Chunk>& chunks) {
  std::string picture;
  for (const Chunk& chunk : chunks)
    picture += std::string(static_cast<size_t>(chunk.rows), static_cast<char>('0' + chunk.replica));
  return picture;
}

}  // namespace

TEST_CASE("even chunks are those of torch.chunk") {
  CHECK(drawn(even_chunks(8, 2)) == "00001111");
  CHECK(drawn(even_chunks(7, 3)) == "0001112");
  CHECK(drawn(even_chunks(4, 3)) == "0011");
  CHECK(drawn(even_chunks(2, 3)) == "01");
  CHECK(drawn(even_chunks(5, 1)) == "00000");
  for (const int64_t rows : {1, 2, 5, 6, 7, 16, 31})
    for (const int64_t replicas : {1, 2, 3, 4, 7}) {
      CAPTURE(rows, replicas);
      const std::vector<at::Tensor> expected = at::arange(rows).chunk(replicas);
      const std::vector<Chunk> chunks = even_chunks(rows, static_cast<size_t>(replicas));
      REQUIRE(chunks.size() == expected.size());
      for (size_t i = 0; i < chunks.size(); ++i) CHECK(chunks[i].rows == expected[i].numel());
    }
}

TEST_CASE("no rows are one empty chunk") {
  CHECK((even_chunks(0, 3) == std::vector<Chunk>{{0, 0}}));
  CHECK((weighted_chunks(0, {0, 2, 1}) == std::vector<Chunk>{{1, 0}}));
}

TEST_CASE("weighted chunks are shares by the largest remainder") {
  CHECK(drawn(weighted_chunks(8, {3, 1})) == "00000011");
  CHECK(drawn(weighted_chunks(8, {1, 0, 3})) == "00222222");
  CHECK(drawn(weighted_chunks(7, {1, 1})) == "0000111");
  CHECK(drawn(weighted_chunks(10, {1, 1, 1})) == "0000111222");
  CHECK(drawn(weighted_chunks(10, {0.35, 0.35, 0.3})) == "0000111222");
  SECTION("at least one row for each weight above 0") {
    CHECK(drawn(weighted_chunks(8, {1000, 1, 1})) == "00000012");
    CHECK(drawn(weighted_chunks(3, {1, 1000, 1})) == "012");
  }
  SECTION("where rows run out the heaviest get one each, in the order of replicas") {
    CHECK(drawn(weighted_chunks(1, {1, 3})) == "1");
    CHECK(drawn(weighted_chunks(2, {2, 1, 3})) == "02");
    CHECK(drawn(weighted_chunks(2, {1, 1, 1})) == "01");
  }
}

TEST_CASE("weighted chunks lose no row") {
  for (int64_t rows = 1; rows < 40; ++rows)
    for (const std::vector<double>& weights :
         {std::vector<double>{1, 1}, {1, 2, 3}, {0.1, 0.1, 5}, {7, 0, 1e-6}, {1e9, 1, 1e9}}) {
      CAPTURE(rows, weights);
      int64_t total = 0;
      for (const Chunk& chunk : weighted_chunks(rows, weights)) {
        CHECK(chunk.rows > 0);
        CHECK(weights[chunk.replica] > 0);
        total += chunk.rows;
      }
      CHECK(total == rows);
    }
}

TEST_CASE("weights that are no shares are refused") {
  using Catch::Contains;
  CHECK_THROWS_WITH(weighted_chunks(4, {1, -1}),
                    Contains("[data_parallel] got the weight -1.0") && Contains("replica 1"));
  CHECK_THROWS_WITH(weighted_chunks(4, {std::nan(""), 1}), Contains("expected a finite number"));
  CHECK_THROWS_WITH(weighted_chunks(4, {0, 0}), Contains("got no weight above 0"));
  CHECK_THROWS_AS(weighted_chunks(4, {}), c10::ValueError);
}

TEST_CASE("another tensor of the batch is cut in the same proportion") {
  CHECK(rows_like({{0, 4}, {1, 4}}, 8) == std::vector<int64_t>{4, 4});
  CHECK(rows_like({{0, 4}, {1, 2}}, 12) == std::vector<int64_t>{8, 4});
  CHECK(rows_like({{0, 4}, {2, 4}}, 2) == std::vector<int64_t>{1, 1});
  CHECK(rows_like({{0, 4}}, 7) == std::vector<int64_t>{7});
  CHECK_THROWS_WITH(rows_like({{0, 4}, {1, 4}, {2, 4}}, 2),
                    Catch::Contains("got a tensor of 2 rows beside one of 12") &&
                        Catch::Contains("each of 3 replicas"));
}

}  // namespace trireme::chunk_plan_test
