#include <trireme/shm/reduce.h>

#include <trireme/shm/reduce_loops.h>

#include <catch2/catch.hpp>
#include <cstring>
#include <stdexcept>
#include <string>

#include "shm/reference.h"

namespace trireme::shm::reduce_test {
namespace {

using reference::Bytes;
using reference::draw;
using reference::first_difference;
using reference::Reduction;

constexpr size_t kRanks[] = {1, 2, 3, 5, 8};
// Around vectors, and around blocks of all element sizes.
constexpr int64_t kNumels[] = {0, 1, 7, 33, 2049};

std::string text_of(const Reduction& job, std::string_view isa) {
  return std::string(isa) + ": " + std::string(name(job.op)) + " of " +
         std::string(name(job.dtype)) + ", " + std::to_string(job.numel) + " elements, " +
         std::to_string(job.sources.size()) + " ranks";
}

Reduction draw_job(Dtype dtype, ReduceOp op, int64_t numel, size_t ranks) {
  std::mt19937 random(static_cast<unsigned>(ranks * 7919 + static_cast<size_t>(numel)));
  Reduction job{dtype, op, numel, {}, {}};
  for (size_t r = 0; r < ranks; ++r) job.sources.push_back(draw(dtype, numel, random));
  std::normal_distribution<double> normal;
  for (size_t r = 0; op == ReduceOp::kPremulSum && r < ranks; ++r) {
    job.factors.push_back(normal(random));
  }
  return job;
}

std::vector<const void*> pointers_to(const std::vector<Bytes>& sources) {
  std::vector<const void*> pointers;
  for (const Bytes& source : sources) pointers.push_back(source.data());
  return pointers;
}

ReduceRequest request_of(const Reduction& job, const std::vector<const void*>& pointers) {
  return {job.dtype, job.op, job.numel, pointers,
          job.factors.empty() ? nullptr : job.factors.data()};
}

template <typename Visit>
void for_each_kind(const Visit& visit) {
  for (const Dtype dtype : reference::kDtypes) {
    for (const ReduceOp op : reference::kOps) {
      if (!refusal(op, dtype)) visit(dtype, op);
    }
  }
}

// Memory whose first byte is `offset` past a line of 64 bytes, between bytes that must not change.
class Fenced {
 public:
  Fenced(size_t bytes, size_t offset) : memory_(bytes + 256, kFence), bytes_(bytes) {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    begin_ = memory_.data() + (64 - address % 64) + offset;
  }
  unsigned char* data() { return begin_; }
  bool fences_stand() const {
    const auto before = begin_ - memory_.data();
    return std::all_of(memory_.begin(), memory_.begin() + before, is_fence) &&
           std::all_of(memory_.begin() + before + static_cast<std::ptrdiff_t>(bytes_),
                       memory_.end(), is_fence);
  }

 private:
  static constexpr unsigned char kFence = 0xA5;
  static bool is_fence(unsigned char byte) { return byte == kFence; }

  Bytes memory_;
  size_t bytes_;
  unsigned char* begin_;
};

uint16_t reduced_16_bits(Dtype dtype, ReduceOp op, const std::vector<double>& values) {
  std::vector<Bytes> sources;
  for (const double value : values) {
    reference::write(dtype, sources.emplace_back(2), 0, value);
  }
  const auto pointers = pointers_to(sources);
  uint16_t bits = 0;
  reduce(&bits, nullptr, {dtype, op, 1, pointers}, false);
  return bits;
}

}  // namespace

TEST_CASE("every instruction set reduces as the reference does") {
  for_each_kind([](Dtype dtype, ReduceOp op) {
    for (const size_t ranks : kRanks) {
      for (const int64_t numel : kNumels) {
        const Reduction job = draw_job(dtype, op, numel, ranks);
        const Bytes expected = reference::reduce(job);
        const auto pointers = pointers_to(job.sources);
        for (const ReduceLoops& loops : supported_reduce_loops()) {
          INFO(text_of(job, loops.isa));
          Fenced dst(expected.size(), 0);
          loops.reduce(dst.data(), nullptr, request_of(job, pointers), false);
          REQUIRE(first_difference(dtype, dst.data(), expected) == -1);
          REQUIRE(dst.fences_stand());
        }
      }
    }
  });
}

TEST_CASE("more elements than any block") {
  for_each_kind([](Dtype dtype, ReduceOp op) {
    const Reduction job = draw_job(dtype, op, 2 * 8192 + 3, 3);
    const Bytes expected = reference::reduce(job);
    const auto pointers = pointers_to(job.sources);
    for (const ReduceLoops& loops : supported_reduce_loops()) {
      INFO(text_of(job, loops.isa));
      Bytes dst(expected.size());
      loops.reduce(dst.data(), nullptr, request_of(job, pointers), false);
      REQUIRE(first_difference(dtype, dst.data(), expected) == -1);
    }
  });
}

TEST_CASE("any one source may be the destination") {
  for_each_kind([](Dtype dtype, ReduceOp op) {
    for (const size_t ranks : {1, 2, 3, 5}) {
      const Reduction job = draw_job(dtype, op, 1031, ranks);
      const Bytes expected = reference::reduce(job);
      for (const ReduceLoops& loops : supported_reduce_loops()) {
        for (size_t rank = 0; rank < ranks; ++rank) {
          INFO(text_of(job, loops.isa) << ", in place of source " << rank);
          std::vector<Bytes> sources = job.sources;
          const auto pointers = pointers_to(sources);
          loops.reduce(sources[rank].data(), nullptr, request_of(job, pointers), false);
          REQUIRE(first_difference(dtype, sources[rank].data(), expected) == -1);
          sources[rank] = job.sources[rank];
          REQUIRE(sources == job.sources);
        }
      }
    }
  });
}

TEST_CASE("the second destination gets the same bytes, wherever it begins") {
  for_each_kind([](Dtype dtype, ReduceOp op) {
    if (op != ReduceOp::kSum && op != ReduceOp::kProduct && op != ReduceOp::kBxor) return;
    const auto real =
        static_cast<size_t>(element_bytes(dtype)) / (reference::is_complex(dtype) + 1u);
    for (const int64_t numel : {1, 13, 9001}) {
      for (const size_t ranks : {1, 2, 3}) {
        const Reduction job = draw_job(dtype, op, numel, ranks);
        const auto pointers = pointers_to(job.sources);
        Bytes dst(job.sources[0].size());
        for (const ReduceLoops& loops : supported_reduce_loops()) {
          for (size_t offset = 0; offset < 64; offset += real) {
            for (const bool streaming : {false, true}) {
              INFO(text_of(job, loops.isa) << ", second at " << offset);
              Fenced second(dst.size(), offset);
              loops.reduce(dst.data(), second.data(), request_of(job, pointers), streaming);
              REQUIRE(std::memcmp(dst.data(), second.data(), dst.size()) == 0);
              REQUIRE(second.fences_stand());
            }
          }
        }
        REQUIRE(first_difference(dtype, dst.data(), reference::reduce(job)) == -1);
      }
    }
  });
}

TEST_CASE("sources and destination need the alignment of an element only") {
  for_each_kind([](Dtype dtype, ReduceOp op) {
    const auto real =
        static_cast<size_t>(element_bytes(dtype)) / (reference::is_complex(dtype) + 1u);
    const Reduction job = draw_job(dtype, op, 77, 3);
    const Bytes expected = reference::reduce(job);
    std::vector<Fenced> moved;
    std::vector<const void*> pointers;
    moved.reserve(job.sources.size());
    for (const Bytes& source : job.sources) {
      moved.emplace_back(source.size(), real * (2 * moved.size() + 1) % 64);
      std::memcpy(moved.back().data(), source.data(), source.size());
      pointers.push_back(moved.back().data());
    }
    for (const ReduceLoops& loops : supported_reduce_loops()) {
      INFO(text_of(job, loops.isa));
      Fenced dst(expected.size(), real * 7 % 64);
      loops.reduce(dst.data(), nullptr, request_of(job, pointers), false);
      REQUIRE(first_difference(dtype, dst.data(), expected) == -1);
    }
  });
}

TEST_CASE("fp16 and bf16 are rounded once, at the end") {
  for (const Dtype dtype : {Dtype::kF16, Dtype::kBF16}) {
    const int fraction = reference::fraction_bits(dtype);
    const double ulp = std::ldexp(1.0, -fraction);  // unit of numbers from 1 to 2
    // Rounded after every addition, each of the two would be a tie that goes back to 1.
    CHECK(reduced_16_bits(dtype, ReduceOp::kSum, {1.0, ulp / 2, ulp / 2}) ==
          reference::to_16_bits(1.0 + ulp, fraction));
    CHECK(reduced_16_bits(dtype, ReduceOp::kSum, {1.0, ulp / 2}) ==
          reference::to_16_bits(1.0, fraction));
    CHECK(reduced_16_bits(dtype, ReduceOp::kSum, {1.0 + ulp, ulp / 2}) ==
          reference::to_16_bits(1.0 + 2 * ulp, fraction));
    CHECK(reduced_16_bits(dtype, ReduceOp::kProduct, {1.0 + ulp, 1.0 + ulp, 1.0 + ulp}) ==
          reference::to_16_bits((1.0 + ulp) * (1.0 + ulp) * (1.0 + ulp), fraction));
  }
  // 40000 + 40000 is beyond fp16, their mean is not.
  CHECK(reduced_16_bits(Dtype::kF16, ReduceOp::kAvg, {40000.0, 40000.0}) ==
        reference::to_16_bits(40000.0, 10));
  CHECK(reduced_16_bits(Dtype::kF16, ReduceOp::kSum, {40000.0, 40000.0}) == 0x7C00);
}

TEST_CASE("sums of halves that are exact in fp32 agree with double arithmetic") {
  std::mt19937 random(3);
  for (const Dtype dtype : {Dtype::kF16, Dtype::kBF16}) {
    for (int trial = 0; trial < 2000; ++trial) {
      std::vector<double> values(8);
      double sum = 0;
      for (double& value : values) {
        value = (static_cast<double>(random() % 255) - 127) * std::ldexp(1.0, -int(random() % 12));
        sum += value;
      }
      REQUIRE(reduced_16_bits(dtype, ReduceOp::kSum, values) ==
              reference::to_16_bits(sum, reference::fraction_bits(dtype)));
    }
  }
}

TEST_CASE("minimum and maximum are NaN if any source is") {
  for (const Dtype dtype : {Dtype::kF16, Dtype::kBF16, Dtype::kF32, Dtype::kF64}) {
    for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
      for (size_t rank = 0; rank < 3; ++rank) {
        Reduction job = draw_job(dtype, op, 1, 3);
        for (size_t r = 0; r < 3; ++r) {
          reference::write(dtype, job.sources[r], 0, r == rank ? NAN : -HUGE_VAL);
        }
        const auto pointers = pointers_to(job.sources);
        Bytes dst(job.sources[0].size());
        reduce(dst.data(), nullptr, request_of(job, pointers), false);
        CHECK(std::isnan(reference::read(dtype, dst, 0)));
      }
    }
  }
}

TEST_CASE("an average is a division, as torch's `/ world`") {
  const float one = 1.0f, zero = 0.0f;
  for (const int ranks : {3, 5, 7, 49}) {
    std::vector<const void*> pointers(static_cast<size_t>(ranks), &zero);
    pointers[1] = &one;
    float mean = 0;
    reduce(&mean, nullptr, {Dtype::kF32, ReduceOp::kAvg, 1, pointers}, false);
    CHECK(mean == 1.0f / static_cast<float>(ranks));
  }
  // These are averages of sums that hold several terms each.
  const float first = 4.0f, second = 3.0f;
  const std::vector<const void*> pointers{&first, &second};
  for (const int64_t terms : {3, 5, 8}) {
    float mean = 0;
    ReduceRequest request{Dtype::kF32, ReduceOp::kAvg, 1, pointers};
    request.terms = terms;
    reduce(&mean, nullptr, request, false);
    CHECK(mean == 7.0f / static_cast<float>(terms));
  }
  // More terms than the dtype of integers can count.
  const int8_t minus = -100, plus = 3;
  const std::vector<const void*> sums{&minus, &plus};
  for (const int64_t terms : {2, 50, 300}) {
    int8_t mean = 1;
    ReduceRequest request{Dtype::kI8, ReduceOp::kAvg, 1, sums};
    request.terms = terms;
    reduce(&mean, nullptr, request, false);
    CHECK(int{mean} == -97 / terms);
  }
}

TEST_CASE("bytes are copied past the caches, wherever they begin and end") {
  std::mt19937 random(5);
  const Bytes src = draw(Dtype::kU8, 5000, random);
  for (const ReduceLoops& loops : supported_reduce_loops()) {
    for (size_t offset = 0; offset < 64; ++offset) {
      for (const int64_t bytes : {0, 1, 15, 63, 64, 65, 127, 128, 4801}) {
        INFO(loops.isa << ", " << bytes << " bytes to " << offset);
        Fenced dst(static_cast<size_t>(bytes), offset);
        const auto* from = src.data() + offset * 3;
        loops.copy_streaming(dst.data(), from, bytes);
        REQUIRE(std::memcmp(dst.data(), from, static_cast<size_t>(bytes)) == 0);
        REQUIRE(dst.fences_stand());
      }
    }
  }
  Bytes dst(src.size());
  copy(dst.data(), src.data(), 5000);
  CHECK(dst == src);
  dst.assign(src.size(), 0);
  copy_streaming(dst.data(), src.data(), 5000);
  CHECK(dst == src);
  copy(nullptr, nullptr, 0);
  copy_streaming(nullptr, nullptr, 0);
}

TEST_CASE("what an operation cannot do is refused") {
  const auto refused = [](ReduceOp op, std::initializer_list<Dtype> dtypes) {
    for (const Dtype dtype : reference::kDtypes) {
      const bool listed = std::find(dtypes.begin(), dtypes.end(), dtype) != dtypes.end();
      INFO(name(op) << " of " << name(dtype));
      CHECK(refusal(op, dtype).has_value() == listed);
    }
  };
  using enum Dtype;
  const auto no_fractions = {kBool, kU8, kI8, kU16, kI16, kU32, kI32, kU64, kI64, kBytes};
  const auto no_bits = {kF16, kBF16, kF32, kF64, kComplexF32, kComplexF64, kBytes};
  refused(ReduceOp::kSum, {kBytes});
  refused(ReduceOp::kProduct, {kBytes});
  refused(ReduceOp::kAvg, {kBool, kBytes});
  refused(ReduceOp::kPremulSum, no_fractions);
  refused(ReduceOp::kMin, {kComplexF32, kComplexF64, kBytes});
  refused(ReduceOp::kMax, {kComplexF32, kComplexF64, kBytes});
  refused(ReduceOp::kBand, no_bits);
  refused(ReduceOp::kBor, no_bits);
  refused(ReduceOp::kBxor, no_bits);
  for (const Dtype dtype : {kF8E4M3, kF8E5M2, kF8E4M3Nuz, kF8E5M2Nuz, kF8E8M0})
    CHECK(refusal(ReduceOp::kSum, dtype));
  CHECK(refusal(ReduceOp::kSum, static_cast<Dtype>(200)));
  CHECK(refusal(static_cast<ReduceOp>(200), kF32));
}

TEST_CASE("a request that cannot be done says so") {
  const float one = 1.0f;
  const std::vector<const void*> pointers{&one};
  float dst = 0;
  const auto message = [&](const ReduceRequest& request) -> std::string {
    try {
      reduce(&dst, nullptr, request, false);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "accepted";
  };
  CHECK(message({Dtype::kF32, ReduceOp::kSum, 1, pointers}) == "accepted");
  CHECK(message({Dtype::kF32, ReduceOp::kBor, 1, pointers}) ==
        "[reduce] got BOR of float32, but bits are combined of integers and bool only. Choose "
        "another operation, or convert first.");
  CHECK(message({Dtype::kF32, ReduceOp::kSum, 1, {}}) ==
        "[reduce] got 0 sources of 1 elements, expected at least one source. Pass one source per "
        "rank.");
  CHECK(message({Dtype::kF32, ReduceOp::kSum, -1, pointers}).find("1 sources of -1 elements") !=
        std::string::npos);
  CHECK(message({Dtype::kF32, ReduceOp::kPremulSum, 1, pointers}) ==
        "[reduce] got PREMUL_SUM without factors, expected one per source. Pass factors, or use "
        "SUM.");
  ReduceRequest average{Dtype::kF32, ReduceOp::kAvg, 1, pointers};
  average.terms = 3;
  CHECK(message(average).find("terms of a single source") != std::string::npos);
}

}  // namespace trireme::shm::reduce_test
