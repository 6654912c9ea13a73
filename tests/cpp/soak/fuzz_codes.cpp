// What decodes gradients of other ranks, given any bytes as the code: it adds up numbers, or throws
// c10::ValueError. An input begins with what the code is of: a kind, options, and how many values.

#include <trireme/kernels/block_codes.h>
#include <trireme/kernels/sparse_codes.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <soak/fuzz_target.h>
#include <utility>
#include <vector>

namespace trireme::soak {
namespace {

constexpr size_t kHead = 4;
constexpr uint8_t kBlockKinds = 3;
constexpr int64_t kBlocks[] = {1, 8, 64, 100};
constexpr SparseFormat kSparse[] = {{0.01},    {1},          {0.5, 1},      {0.1, 8},
                                    {0.1, 64}, {0.01, 4096}, {0.25, 64, 2}, {1, 4, 2}};

void check(bool is_true) {
  if (!is_true) std::abort();
}

// In memory of its own, so that reading and writing behind it is seen.
std::vector<std::byte> exactly(int64_t bytes, const uint8_t* data, size_t size) {
  std::vector<std::byte> code(static_cast<size_t>(bytes), std::byte{0});
  std::memcpy(code.data(), data, std::min(size, code.size()));
  code.shrink_to_fit();
  return code;
}

// Decodes what was given, twice in one sum; then codes what came, which must come back.
template <typename Format, typename Values>
void decode_and_encode(const Format& format, int64_t bytes, int64_t numel, const uint8_t* data,
                       size_t size) {
  std::vector<std::byte> code = exactly(bytes, data, size);
  const std::vector<const std::byte*> both{code.data(), code.data()};
  std::vector<float> found(static_cast<size_t>(numel)), residual(static_cast<size_t>(numel), 0.5F);
  decode(format, both, found.data(), numel, 0.5F);
  Values values{found.data(), residual.data(), numel};
  encode(format, values, code.data());
  decode(format, {both.data(), 1}, found.data(), numel, 1);
}

}  // namespace

std::vector<std::vector<uint8_t>> seeds() {
  std::vector<std::vector<uint8_t>> all;
  const size_t kinds = kBlockKinds + std::size(kSparse);
  for (size_t kind = 0; kind < kinds; ++kind) {
    std::vector<uint8_t> seed{static_cast<uint8_t>(kind), 2, 1, 44};  // 300 values
    for (size_t i = 0; i < 600; ++i) seed.push_back(static_cast<uint8_t>(i % 3 == 0 ? i : 0));
    all.push_back(std::move(seed));
  }
  return all;
}

}  // namespace trireme::soak

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace trireme;
  using namespace trireme::soak;
  if (size < kHead) return 0;
  const size_t kind = data[0] % (kBlockKinds + std::size(kSparse));
  const int64_t block = kBlocks[data[1] % std::size(kBlocks)];
  const int64_t numel = data[2] % 16 * 256 + data[3] + 1;
  data += kHead;
  size -= kHead;
  try {
    if (kind < kBlockKinds) {
      const BlockFormat format{static_cast<BlockKind>(kind), block};
      decode_and_encode<BlockFormat, BlockValues>(format, code_bytes(format, numel), numel, data,
                                                  size);
    } else {
      const SparseFormat& format = kSparse[kind - kBlockKinds];
      check(format.count(numel) <= numel);
      decode_and_encode<SparseFormat, SparseValues>(format, format.bytes(numel), numel, data, size);
    }
  } catch (const c10::ValueError&) {
  }
  return 0;
}
