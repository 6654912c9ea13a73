#pragma once

#include <trireme/common/export.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace trireme {

// What a block of values becomes: 8 or 4 bits each, and the largest of them as a scale; or their
// signs, and the mean of their sizes.
enum class BlockKind : uint8_t { kInt8, kInt4, kSign };

// A code of runs of fp32 values, block by block; the last block of a run may be short.
//
//   [ scales: one fp32 per block ][ block 0 ][ block 1 ] ...
//
// A block of n values takes n bytes, n / 2 or n / 8, rounded up. With p a value, `most` the largest
// size in its block and `top` 127 or 7:
//
//   kInt8, kInt4   q = rint(p * (top / most)), decoded as q * (most / top)
//   kSign          p < 0 ? -a : a, where a is the mean size in the block
//
// A block whose sizes are so small that top / most is no finite number is coded as zeros. One that
// holds NaN or Inf is decoded as NaN.
struct BlockFormat {
  BlockKind kind = BlockKind::kInt8;
  int64_t block = 256;  // values, at least 1

  int64_t blocks(int64_t numel) const { return (numel + block - 1) / block; }
};

// Returns the bytes of the code of `numel` values.
TRIREME_API int64_t code_bytes(const BlockFormat& format, int64_t numel);

// Values to be coded.
struct BlockValues {
  const float* values;
  // What earlier codes left out, one per value, or null. It is added to the values, and then holds
  // what this code leaves out: values + residual - decoded. It stays as it is in a block that holds
  // NaN or Inf.
  float* residual = nullptr;
  int64_t numel = 0;
  // Rounds up or down by chance, so that the decoded value is right on average, if present: drawn
  // from this number and the place of a value alone. Of kSign it changes nothing.
  std::optional<uint32_t> dither = std::nullopt;
  int64_t first = 0;  // the place of the first value
};

// Writes code_bytes() to `code`, which is aligned to 4 bytes. More than 32768 values are shared
// among the threads of torch's intra-op pool.
TRIREME_API void encode(const BlockFormat& format, const BlockValues& from, std::byte* code);

// Sets to[i] to `factor` times the sum of what the codes of several ranks say of it, added up in
// their order. Any bytes are a code; each must have code_bytes(), aligned to 4 bytes.
TRIREME_API void decode(const BlockFormat& format, std::span<const std::byte* const> codes,
                        float* to, int64_t numel, float factor);

namespace cpu {

// The coding of adjacent blocks by the calling thread.
struct BlockEncoding {
  const float* values;
  float* residual;
  int64_t numel;  // of all these blocks
  int64_t block;
  float* scales;
  std::byte* codes;
  std::optional<uint32_t> dither;
  int64_t begin;  // the place of the first value in the run
};
struct BlockDecoding {
  float* to;
  int64_t numel;
  int64_t block;
  std::span<const std::byte* const> codes;  // of whole runs
  int64_t blocks;                           // in a run
  int64_t first;                            // block to begin with
  float factor;
};
using EncodeLoop = void (*)(const BlockEncoding& blocks);
using DecodeLoop = void (*)(const BlockDecoding& blocks);

// The loops of one instruction set, by BlockKind. All sets give the same bits, save those of a NaN.
struct BlockLoops {
  std::string_view isa;
  std::array<EncodeLoop, 3> encode;
  std::array<DecodeLoop, 3> decode;
};

// Returns the loops that this processor can run, the fastest last; exported for the tests, which
// run each of them.
TRIREME_API std::span<const BlockLoops> supported_block_loops();

}  // namespace cpu
}  // namespace trireme
