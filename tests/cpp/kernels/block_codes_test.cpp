#include <trireme/kernels/block_codes.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "catch_torch.h"

namespace trireme::block_codes_test {

namespace {

using Floats = std::vector<float>;
using Bytes = std::vector<std::byte>;

constexpr int64_t kLengths[] = {0, 1, 7, 8, 9, 31, 256, 257, 1000, 1100};
constexpr int64_t kBlocks[] = {1, 3, 8, 64, 256, 2000};
constexpr BlockKind kKinds[] = {BlockKind::kInt8, BlockKind::kInt4, BlockKind::kSign};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

Floats drawn(int64_t numel, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Floats values(static_cast<size_t>(numel));
  for (float& value : values) value = normal(random) * (random() % 7 == 0 ? 1e-3F : 1.0F);
  return values;
}

// Codes by the loops of one instruction set, on one thread.
Bytes encoded(const cpu::BlockLoops& loops, const BlockFormat& format, const Floats& values,
              Floats* residual, std::optional<uint32_t> dither = std::nullopt) {
  const auto numel = static_cast<int64_t>(values.size());
  Bytes code(static_cast<size_t>(code_bytes(format, numel)) + 4, std::byte{0});
  auto* scales = reinterpret_cast<float*>(code.data());
  loops.encode[static_cast<size_t>(format.kind)](
      {values.data(), residual ? residual->data() : nullptr, numel, format.block, scales,
       code.data() + format.blocks(numel) * 4, dither, 0});
  return code;
}

Floats decoded(const cpu::BlockLoops& loops, const BlockFormat& format,
               const std::vector<const std::byte*>& codes, int64_t numel, float factor = 1) {
  Floats found(static_cast<size_t>(numel), -1);
  loops.decode[static_cast<size_t>(format.kind)](
      {found.data(), numel, format.block, codes, format.blocks(numel), 0, factor});
  return found;
}

// What a block becomes, as the header says it.
void expect_block(BlockKind kind, const float* values, int64_t count, float* expected) {
  float most = 0;
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    most = std::max(most, std::abs(values[i]));
    sum += std::abs(values[i]);
  }
  const float top = kind == BlockKind::kInt8 ? 127 : 7;
  const auto size = static_cast<float>(sum / static_cast<double>(count));
  for (int64_t i = 0; i < count; ++i) {
    if (kind == BlockKind::kSign) {
      expected[i] = values[i] < 0 ? -size : size;
    } else {
      expected[i] = most == 0 ? 0 : std::nearbyint(values[i] * (top / most)) * (most / top);
    }
  }
}

Floats expected_of(const BlockFormat& format, const Floats& values) {
  const auto numel = static_cast<int64_t>(values.size());
  Floats expected(values.size());
  for (int64_t begin = 0; begin < numel; begin += format.block)
    expect_block(format.kind, values.data() + begin, std::min(format.block, numel - begin),
                 expected.data() + begin);
  return expected;
}

void require_close(const Floats& found, const Floats& expected) {
  for (size_t i = 0; i < found.size(); ++i) {
    INFO("element " << i);
    REQUIRE(std::abs(found[i] - expected[i]) <= 1e-6F * std::abs(expected[i]));
  }
}

bool same_bits(const Floats& one, const Floats& other) {
  return one.empty() || std::memcmp(one.data(), other.data(), one.size() * sizeof(float)) == 0;
}

template <typename Visit>
void each_format(const Visit& visit) {
  for (const BlockKind kind : kKinds)
    for (const int64_t block : kBlocks)
      for (const int64_t numel : kLengths) visit(BlockFormat{kind, block}, numel);
}

}  // namespace

TEST_CASE("every instruction set codes blocks as the reference does, and to the same bits") {
  const auto all = cpu::supported_block_loops();
  each_format([&](const BlockFormat& format, int64_t numel) {
    INFO("kind " << static_cast<int>(format.kind) << ", block " << format.block << ", " << numel);
    const Floats values = drawn(numel, 1);
    const Floats before = drawn(numel, 2);
    Floats sums(values.size());
    for (size_t i = 0; i < values.size(); ++i) sums[i] = values[i] + before[i];
    Floats first_residual;
    Bytes first_code;
    for (const cpu::BlockLoops& loops : all) {
      INFO("instruction set " << loops.isa);
      Floats residual = before;
      const Bytes code = encoded(loops, format, values, &residual);
      const Floats found = decoded(loops, format, {code.data()}, numel);
      require_close(found, expected_of(format, sums));
      for (size_t i = 0; i < sums.size(); ++i) REQUIRE(residual[i] == sums[i] - found[i]);
      const Bytes without = encoded(loops, format, sums, nullptr);
      CHECK((without == code));
      if (first_code.empty()) {
        first_code = code;
        first_residual = residual;
      }
      CHECK((code == first_code));
      CHECK(same_bits(residual, first_residual));
    }
  });
}

TEST_CASE("codes of several senders are added up in their order, times a factor") {
  each_format([](const BlockFormat& format, int64_t numel) {
    for (const cpu::BlockLoops& loops : cpu::supported_block_loops()) {
      std::vector<Bytes> codes;
      for (uint32_t sender = 0; sender < 3; ++sender)
        codes.push_back(encoded(loops, format, drawn(numel, sender), nullptr));
      const Floats found =
          decoded(loops, format, {codes[0].data(), codes[1].data(), codes[2].data()}, numel, 0.5F);
      Floats expected(static_cast<size_t>(numel), 0);
      for (const Bytes& code : codes) {
        const Floats one = decoded(loops, format, {code.data()}, numel);
        for (size_t i = 0; i < one.size(); ++i) expected[i] += one[i];
      }
      for (float& value : expected) value *= 0.5F;
      REQUIRE(same_bits(found, expected));
    }
  });
}

TEST_CASE("a block that holds what is not finite is NaN, and its residual stays") {
  for (const cpu::BlockLoops& loops : cpu::supported_block_loops()) {
    for (const BlockKind kind : kKinds) {
      for (const float broken : {kNan, std::numeric_limits<float>::infinity()}) {
        const BlockFormat format{kind, 64};
        Floats values = drawn(200, 1);
        values[70] = broken;
        const Floats before = drawn(200, 2);
        Floats residual = before;
        const Bytes code = encoded(loops, format, values, &residual);
        const Floats found = decoded(loops, format, {code.data()}, 200);
        for (size_t i = 0; i < found.size(); ++i) {
          const bool is_broken = i >= 64 && i < 128;
          CHECK(std::isfinite(found[i]) != is_broken);
          if (is_broken) CHECK(residual[i] == before[i]);
        }
      }
    }
  }
}

TEST_CASE("zeros and numbers that are too small for a scale are kept whole") {
  for (const cpu::BlockLoops& loops : cpu::supported_block_loops()) {
    for (const float size : {0.0F, 1e-42F, std::numeric_limits<float>::denorm_min()}) {
      const BlockFormat format{BlockKind::kInt8, 64};
      const Floats values(100, size);
      Floats residual(100, 0);
      const Bytes code = encoded(loops, format, values, &residual);
      CHECK(decoded(loops, format, {code.data()}, 100) == Floats(100, 0));
      CHECK(residual == values);
    }
  }
}

TEST_CASE("dithered codes are right on average, and depend on seed and place alone") {
  const BlockFormat format{BlockKind::kInt8, 256};
  Floats values(4096, 0.3F);
  for (size_t i = 0; i < values.size(); i += 256) values[i] = 127;
  Bytes first;
  for (const cpu::BlockLoops& loops : cpu::supported_block_loops()) {
    const Bytes code = encoded(loops, format, values, nullptr, 7);
    if (first.empty()) first = code;
    CHECK((code == first));
    CHECK((encoded(loops, format, values, nullptr, 8) != code));
    const Floats found = decoded(loops, format, {code.data()}, 4096);
    double sum = 0;
    for (size_t i = 0; i < found.size(); ++i) {
      if (i % 256 == 0) continue;
      CHECK((found[i] == 0 || found[i] == 1));
      sum += found[i];
    }
    CHECK(std::abs(sum / 4080 - 0.3) < 0.03);
  }
}

TEST_CASE("any bytes are a code") {
  std::mt19937 random(5);
  each_format([&](const BlockFormat& format, int64_t numel) {
    Bytes code(static_cast<size_t>(code_bytes(format, numel)));
    for (std::byte& byte : code) byte = static_cast<std::byte>(random());
    const std::byte* codes[] = {code.data()};
    Floats found(static_cast<size_t>(numel));
    decode(format, codes, found.data(), numel, 1);
    for (const cpu::BlockLoops& loops : cpu::supported_block_loops())
      CHECK(decoded(loops, format, {code.data()}, numel).size() == found.size());
  });
}

TEST_CASE("many blocks are shared among threads without a difference") {
  for (const BlockKind kind : kKinds) {
    const BlockFormat format{kind, 77};
    const Floats values = drawn(200'000, 3);
    Floats residual(values.size(), 0.25F);
    Floats alone = residual;
    Bytes code(static_cast<size_t>(code_bytes(format, 200'000)) + 4, std::byte{0});
    encode(format, {values.data(), residual.data(), 200'000, std::nullopt}, code.data());
    const cpu::BlockLoops& best = cpu::supported_block_loops().back();
    CHECK((code == encoded(best, format, values, &alone)));
    CHECK(same_bits(residual, alone));
    const std::byte* codes[] = {code.data()};
    Floats found(values.size());
    decode(format, codes, found.data(), 200'000, 1);
    CHECK(same_bits(found, decoded(best, format, {code.data()}, 200'000)));
  }
}

}  // namespace trireme::block_codes_test
