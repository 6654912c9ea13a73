#include <trireme/kernels/sparse_codes.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "catch_torch.h"

namespace trireme::sparse_codes_test {

namespace {

using Floats = std::vector<float>;
using Bytes = std::vector<std::byte>;

constexpr int64_t kLengths[] = {1, 5, 64, 100, 1000};
constexpr int64_t kChunks[] = {0, 1, 8, 64, 4096};
constexpr double kDensities[] = {1e-6, 0.1, 0.5, 1};

Floats drawn(int64_t numel, uint32_t seed) {
  std::mt19937 random(seed);
  Floats values(static_cast<size_t>(numel));
  for (float& value : values)  // few sizes, so that there are ties
    value = static_cast<float>(static_cast<int>(random() % 21) - 10);
  return values;
}

Bytes encoded(const SparseFormat& format, const SparseValues& from) {
  Bytes code(static_cast<size_t>(format.bytes(from.numel)));
  encode(format, from, code.data());
  return code;
}

Floats decoded(const SparseFormat& format, const Bytes& code, int64_t numel) {
  Floats found(static_cast<size_t>(numel), -1);
  const std::byte* codes[] = {code.data()};
  decode(format, codes, found.data(), numel, 1);
  return found;
}

// Keeps the largest of each run, as the header says it.
Floats expected_of(const SparseFormat& format, const Floats& values) {
  Floats expected(values.size(), 0);
  const size_t length = format.chunk == 0 ? values.size() : static_cast<size_t>(format.chunk);
  for (size_t begin = 0; begin < values.size(); begin += length) {
    const size_t numel = std::min(length, values.size() - begin);
    std::vector<size_t> order(numel);
    std::iota(order.begin(), order.end(), begin);
    std::stable_sort(order.begin(), order.end(), [&](size_t one, size_t other) {
      return std::abs(values[one]) > std::abs(values[other]);
    });
    const auto count = static_cast<size_t>(std::ceil(format.density * static_cast<double>(numel)));
    for (size_t i = 0; i < count; ++i) expected[order[i]] = values[order[i]];
  }
  return expected;
}

// Decodes bytes that nobody has coded.
void decode_any(const SparseFormat& format, int64_t numel, std::mt19937& random) {
  Bytes code(static_cast<size_t>(format.bytes(numel)));
  for (int turn = 0; turn < 20; ++turn) {
    for (std::byte& byte : code) byte = static_cast<std::byte>(random());
    try {
      decoded(format, code, numel);
    } catch (const c10::ValueError&) {
    }
  }
}

template <typename Visit>
void each_format(const Visit& visit) {
  for (const double density : kDensities)
    for (const int64_t chunk : kChunks)
      for (const int64_t numel : kLengths) visit(SparseFormat{density, chunk}, numel);
}

}  // namespace

TEST_CASE("the largest values of each run are sent, ties by their place") {
  each_format([](const SparseFormat& format, int64_t numel) {
    INFO("density " << format.density << ", chunk " << format.chunk << ", " << numel);
    const Floats values = drawn(numel, 1);
    const Floats before = drawn(numel, 2);
    Floats sums(values.size());
    for (size_t i = 0; i < sums.size(); ++i) sums[i] = values[i] + 0.5F * before[i];
    Floats residual = before;
    const Bytes code = encoded(format, {values.data(), residual.data(), numel, 0.5F});
    const Floats found = decoded(format, code, numel);
    REQUIRE(found == expected_of(format, sums));
    for (size_t i = 0; i < sums.size(); ++i) REQUIRE(residual[i] == sums[i] - found[i]);
  });
}

TEST_CASE("a code of the largest values takes as many bytes as it says") {
  CHECK(SparseFormat{0.01}.bytes(1000) == 80);
  CHECK(SparseFormat{1.0 / 64, 4096}.bytes(8192) == 128 * 4 + 128 * 12 / 8);
  CHECK(SparseFormat{0.5, 8}.bytes(9) == 5 * 4 + 2);
}

TEST_CASE("values of two bits are a sign and one of two sizes, and nothing is lost") {
  const SparseFormat format{0.5, 8, 2};
  CHECK(format.bytes(9) == 2 * 4 + (5 * (3 + 2) + 7) / 8);
  const Floats values{1, -9, 2, 8, 0.5, -3, 0.25, 0, -1e9F};
  Floats residual(9, 0);
  const Floats found = decoded(format, encoded(format, {values.data(), residual.data(), 9}), 9);
  // Of 9, 8, 3 and 2, with the mean 5.5; and what fp16 holds of 1e9.
  CHECK(found == Floats{0, -8.5F, 2.5F, 8.5F, 0, -2.5F, 0, 0, -65504});
  for (size_t i = 0; i < 9; ++i) CHECK(residual[i] == values[i] - found[i]);
}

TEST_CASE("a threshold sends at most as many, and nothing is lost") {
  const SparseFormat format{0.01};
  constexpr int64_t kNumel = 100'000;
  float threshold = 0;
  Floats residual(kNumel, 0);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  int64_t all = 0;
  for (uint32_t step = 0; step < 20; ++step) {
    Floats values(kNumel);
    for (float& value : values) value = normal(random);
    const Floats before = residual;
    const Bytes code =
        encoded(format, {values.data(), residual.data(), kNumel, 1, &threshold, step * 77});
    const Floats found = decoded(format, code, kNumel);
    int64_t count = 0;
    for (size_t i = 0; i < found.size(); ++i) {
      count += found[i] != 0 ? 1 : 0;
      REQUIRE(found[i] + residual[i] == values[i] + before[i]);
    }
    CHECK(count <= 1000);
    if (step >= 5) all += count;
  }
  CHECK(all >= 15 * 800);
}

TEST_CASE("every instruction set takes the same sums above a threshold, and leaves the same rest") {
  for (const int64_t numel : {1, 7, 64, 1000, 1025}) {
    for (const bool has_residual : {false, true}) {
      for (const int64_t room : {numel, numel / 4}) {
        INFO(numel << " values, room for " << room << ", residual " << has_residual);
        const Floats values = drawn(numel, 1);
        const Floats before = drawn(numel, 2);
        for (const cpu::SparseLoops& loops : cpu::supported_sparse_loops()) {
          INFO("instruction set " << loops.isa);
          Floats residual = before;
          const cpu::SparseSums from{values.data(), has_residual ? residual.data() : nullptr, numel,
                                     0.75F};
          Floats sums = values;
          for (size_t i = 0; has_residual && i < sums.size(); ++i) sums[i] += 0.75F * before[i];
          float most = 0;
          for (const float sum : sums) most = std::max(most, std::abs(sum));
          CHECK(std::bit_cast<float>(loops.largest(from)) == most);
          Floats taken(static_cast<size_t>(room), 0);
          std::vector<uint32_t> places(static_cast<size_t>(room));
          const int64_t count = loops.take_large(from, 4, {taken.data(), places.data(), room});
          int64_t expected = 0;
          for (size_t i = 0; i < sums.size(); ++i) {
            if (std::abs(sums[i]) >= 4 && expected < room) {
              REQUIRE(places[static_cast<size_t>(expected)] == i);
              REQUIRE(taken[static_cast<size_t>(expected++)] == std::exchange(sums[i], 0.0F));
            }
          }
          CHECK(count == expected);
          if (has_residual) CHECK(residual == sums);
        }
      }
    }
  }
}

TEST_CASE("a run that holds what is not finite says so, and keeps its residual") {
  for (const SparseFormat format : {SparseFormat{0.1}, {0.1, 64}, {0.1, 64, 2}}) {
    const int64_t chunk = format.chunk;
    Floats values = drawn(200, 1);
    values[70] = std::numeric_limits<float>::infinity();
    const Floats before = drawn(200, 2);
    Floats residual = before;
    const Floats found =
        decoded(format, encoded(format, {values.data(), residual.data(), 200}), 200);
    CHECK(std::any_of(found.begin(), found.end(), [](float one) { return !std::isfinite(one); }));
    for (size_t i = 0; i < residual.size(); ++i)
      if (chunk == 0 || (i >= 64 && i < 128)) CHECK(residual[i] == before[i]);
  }
}

TEST_CASE("a place outside of the run is refused; other bytes are a code") {
  std::mt19937 random(5);
  each_format([&](const SparseFormat& format, int64_t numel) {
    decode_any(format, numel, random);
    if (format.chunk != 0) decode_any({format.density, format.chunk, 2}, numel, random);
  });
  const SparseFormat format{0.5};
  Bytes code(static_cast<size_t>(format.bytes(4)), std::byte{255});
  CHECK_THROWS_AS(decoded(format, code, 4), c10::ValueError);
}

}  // namespace trireme::sparse_codes_test
