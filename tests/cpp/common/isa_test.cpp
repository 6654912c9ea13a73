#include <trireme/common/isa.h>

#include <bit>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdint>
#include <limits>
#include <tuple>
#include <type_traits>
#include <vector>

namespace trireme::cpu::isa_test {
namespace {

constexpr int kFirstNan = 0x7C01;

// What the bits of a finite fp16 without sign mean.
double meaning(int bits) {
  const int exponent = bits >> 10;
  const int units = bits & 0x3FF;
  return exponent == 0 ? std::ldexp(units, -24) : std::ldexp(1024 + units, exponent - 25);
}

template <typename Visit, typename... Isa>
void for_supported(const Visit& visit, std::type_identity<std::tuple<Isa...>>) {
  ((Isa::supported() ? visit(Isa{}) : void()), ...);
}

struct Rounding {
  float value;
  uint16_t bits;
};

// Every fp16, and the numbers at and next to the middle of every two neighbours.
std::vector<Rounding> roundings() {
  std::vector<Rounding> cases;
  const float infinity = std::numeric_limits<float>::infinity();
  const auto add = [&](double value, int bits) {
    const auto number = static_cast<float>(value);
    cases.push_back({number, static_cast<uint16_t>(bits)});
    cases.push_back({-number, static_cast<uint16_t>(bits | 0x8000)});
  };
  for (int bits = 0; bits < 0x7C00; ++bits) {
    // The neighbour of the largest one is infinity, which rounding takes to be 65536.
    const double next = bits == 0x7BFF ? 65536.0 : meaning(bits + 1);
    const auto middle = static_cast<float>((meaning(bits) + next) / 2);
    add(meaning(bits), bits);
    add(std::nextafter(middle, 0.0f), bits);
    add(middle, bits % 2 == 0 ? bits : bits + 1);
    add(std::nextafter(middle, infinity), bits + 1);
  }
  for (const double large : {65536.0, 0x1p+17, 0x1p+20, 0x1p+100, 0x1.fffffep127}) {
    add(large, 0x7C00);
  }
  for (const double small : {0x1p-26, 0x1p-100, 0x1p-126, 0x1p-149}) add(small, 0);
  add(infinity, 0x7C00);
  return cases;
}

}  // namespace

TEST_CASE("every fp16 is widened exactly") {
  std::vector<Half> halves(0x10000);
  for (size_t i = 0; i < halves.size(); ++i) halves[i].bits = static_cast<uint16_t>(i);
  std::vector<float> floats(halves.size());
  for_supported(
      [&]<typename Isa>(Isa) {
        INFO(Isa::kName);
        Isa::widen(floats.data(), halves.data(), static_cast<int64_t>(halves.size()), 1.0f);
        for (int bits = 0; bits < 0x10000; ++bits) {
          const float got = floats[static_cast<size_t>(bits)];
          const int magnitude = bits & 0x7FFF;
          if (magnitude >= kFirstNan) {
            REQUIRE(std::isnan(got));
          } else {
            REQUIRE(std::signbit(got) == (bits >= 0x8000));
            REQUIRE(std::fabs(got) == (magnitude == 0x7C00 ? HUGE_VAL : meaning(magnitude)));
          }
        }
      },
      std::type_identity<Isas>{});
}

TEST_CASE("fp32 is narrowed to the nearest fp16, ties to even") {
  const std::vector<Rounding> cases = roundings();
  std::vector<float> floats;
  for (const Rounding& rounding : cases) floats.push_back(rounding.value);
  std::vector<Half> halves(floats.size());
  for_supported(
      [&]<typename Isa>(Isa) {
        Isa::narrow(halves.data(), floats.data(), static_cast<int64_t>(floats.size()), 1.0f);
        for (size_t i = 0; i < cases.size(); ++i) {
          INFO(Isa::kName << ": " << cases[i].value);
          REQUIRE(halves[i].bits == cases[i].bits);
        }
      },
      std::type_identity<Isas>{});
}

TEST_CASE("a NaN narrows to a NaN") {
  const std::vector<float> nans = {
      std::bit_cast<float>(0x7F800001u), std::bit_cast<float>(0x7FC00000u),
      std::bit_cast<float>(0x7FFFFFFFu), std::bit_cast<float>(0xFF800001u)};
  std::vector<float> floats;
  for (int i = 0; i < 5; ++i) floats.insert(floats.end(), nans.begin(), nans.end());
  std::vector<Half> halves(floats.size());
  for_supported(
      [&]<typename Isa>(Isa) {
        INFO(Isa::kName);
        Isa::narrow(halves.data(), floats.data(), static_cast<int64_t>(floats.size()), 1.0f);
        for (const Half half : halves) CHECK((half.bits & 0x7FFF) >= kFirstNan);
        for (const float nan : nans) CHECK((to_bfloat16(nan).bits & 0x7FFF) > 0x7F80);
      },
      std::type_identity<Isas>{});
}

}  // namespace trireme::cpu::isa_test
