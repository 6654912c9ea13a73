#include <trireme/kernels/cuda/flatten_table.h>

#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "catch_torch.h"

namespace trireme::flatten_table_test {

// The arithmetic of the CUDA kernels, run on the host: every block and every thread in turn.
namespace {

using namespace trireme::cuda;

std::unique_ptr<FlattenTable> table_of(const std::vector<int64_t>& numels) {
  auto table = std::make_unique<FlattenTable>();
  clear(*table, 0);
  for (const int64_t numel : numels) REQUIRE(append(*table, nullptr, Real::kFloat, numel));
  return table;
}

struct AddOne {
  static constexpr bool kReadsDst = false;
  template <typename Dst, typename Src>
  Dst operator()(Src value, Dst) const {
    return static_cast<Dst>(value + 1);
  }
};

struct Accumulate {
  static constexpr bool kReadsDst = true;
  template <typename Dst, typename Src>
  Dst operator()(Src value, Dst old) const {
    return static_cast<Dst>(old + value);
  }
};

// Moves src[src_offset..] to dst[dst_offset..] by all threads of a block; whether every element,
// and none beside them, was written once.
template <typename Dst, typename Src, typename Op>
bool moves_each_once(int32_t numel, int dst_offset, int src_offset, const Op& op) {
  std::vector<Src> src(numel + 16);
  std::iota(src.begin(), src.end(), Src{0});
  std::vector<Dst> dst(numel + 32, Dst{7});
  for (int32_t lane = 0; lane < kThreads; ++lane) {
    move_elements(dst.data() + dst_offset, src.data() + src_offset, numel, lane, op);
  }
  for (int32_t i = 0; i < static_cast<int32_t>(dst.size()); ++i) {
    const int32_t k = i - dst_offset;
    const bool inside = k >= 0 && k < numel;
    const Dst expected = inside ? op(src[k + src_offset], Dst{7}) : Dst{7};
    if (dst[i] != expected) return false;
  }
  return true;
}

template <typename Dst, typename Src>
void check_moves() {
  for (const int32_t numel : {0, 1, 3, 4, 255, 257, 1024, 4095, 8191, 8192}) {
    for (const int dst_offset : {0, 1, 4}) {
      for (const int src_offset : {0, 2, 8}) {
        INFO(numel << " elements of " << sizeof(Src) << " to " << sizeof(Dst) << " bytes, offsets "
                   << src_offset << " and " << dst_offset);
        CHECK(moves_each_once<Dst, Src>(numel, dst_offset, src_offset, AddOne{}));
        CHECK(moves_each_once<Dst, Src>(numel, dst_offset, src_offset, Accumulate{}));
      }
    }
  }
}

}  // namespace

TEST_CASE("a table lays tensors one after another and gives each whole blocks") {
  // numel        3        8192     empty   8193          16384
  // flat    0 ....... 3 ...... 8195 ...... 8195 .. 16388 ...... 32772
  // blocks  0         1        2                   4            6
  const auto table = table_of({3, 8192, 0, 8193, 16384});
  CHECK(table->tensors == 4);
  CHECK(blocks_of(*table) == 6);
  CHECK(std::vector<int64_t>(table->flat_begin, table->flat_begin + 5) ==
        std::vector<int64_t>{0, 3, 8195, 16388, 32772});
  CHECK(std::vector<int32_t>(table->block_begin, table->block_begin + 5) ==
        std::vector<int32_t>{0, 1, 2, 4, 6});
}

TEST_CASE("the blocks of a launch cover every element of every tensor once") {
  const std::vector<int64_t> numels = {1, 8192, 8191, 8193, 5, 100000, 1, 1, 16384, 7};
  const auto table = table_of(numels);
  std::vector<int64_t> next(numels.size(), 0);  // per tensor, the element the next chunk begins at
  for (int32_t block = 0; block < blocks_of(*table); ++block) {
    const Chunk chunk = locate(*table, block);
    REQUIRE(chunk.tensor >= 0);
    REQUIRE(chunk.tensor < table->tensors);
    CHECK(chunk.begin == next[chunk.tensor]);
    CHECK(chunk.numel > 0);
    CHECK(chunk.numel <= kChunk);
    next[chunk.tensor] += chunk.numel;
  }
  CHECK(next == numels);
}

TEST_CASE("beyond 2^31 elements the places stay right") {
  const int64_t numel = (int64_t{1} << 33) + 5;
  const auto table = table_of({numel, 10});
  const Chunk last = locate(*table, blocks_of(*table) - 2);
  CHECK(last.tensor == 0);
  CHECK(last.begin == int64_t{1} << 33);
  CHECK(last.numel == 5);
  CHECK(table->flat_begin[1] == numel);
  CHECK(locate(*table, blocks_of(*table) - 1).tensor == 1);
}

TEST_CASE("a full table refuses, unchanged, and the next one continues in flat") {
  const auto table = table_of(std::vector<int64_t>(kTableTensors, 2));
  CHECK_FALSE(append(*table, nullptr, Real::kHalf, 9));
  CHECK(append(*table, nullptr, Real::kHalf, 0));  // an empty tensor takes no room
  CHECK(table->tensors == kTableTensors);
  CHECK(blocks_of(*table) == kTableTensors);
  clear(*table, table->flat_begin[table->tensors]);
  CHECK(blocks_of(*table) == 0);
  CHECK(append(*table, nullptr, Real::kHalf, 9));
  CHECK(table->flat_begin[0] == 2 * kTableTensors);
  CHECK(table->flat_begin[1] == 2 * kTableTensors + 9);
}

TEST_CASE("the threads of a block move every element once, aligned or not") {
  check_moves<uint32_t, uint32_t>();
  check_moves<uint16_t, uint16_t>();
  check_moves<uint64_t, uint64_t>();
  check_moves<uint32_t, uint16_t>();
  check_moves<uint16_t, uint32_t>();
  check_moves<uint64_t, uint16_t>();
  check_moves<uint32_t, uint64_t>();
}

}  // namespace trireme::flatten_table_test
