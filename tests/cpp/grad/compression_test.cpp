#include <trireme/grad/codes/compression.h>

#include <catch_torch.h>
#include <cstdint>

namespace trireme::compression_test {

TEST_CASE("parameters that a place of 32 bits cannot name go as fp32", "[compression]") {
  constexpr int64_t kMost = 0xFFFFFFFF;
  CHECK_FALSE(is_dense(TopK{}, {kMost, 1}));
  CHECK(is_dense(TopK{}, {kMost + 1, 1}));
  CHECK_FALSE(is_dense(TopK{.chunk = 64}, {kMost + 1, 1}));
}

}  // namespace trireme::compression_test
