#include <trireme/common/isa.h>
#include <trireme/kernels/block_codes.h>
#include <trireme/kernels/random_bits.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

// Loops are written once, as plain C++ that compilers vectorise, and compiled once per instruction
// set. No product is fused into a sum in this file: a residual is what is left of the very number
// that the other ranks decode.
namespace trireme::cpu {
namespace {

constexpr int64_t kPiece = 512;  // values on the stack at a time; whole bytes of every kind
constexpr int64_t kLanes = 16;   // partial sums of a mean

constexpr uint32_t kSizeBits = 0x7fffffff;
constexpr uint32_t kInfinityBits = 0x7f800000;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Rounds to the nearest whole number, ties to even; sizes below 2^22.
TRIREME_INLINE float rounded(float value) {
  constexpr float kShift = 12582912.0F;  // 1.5 * 2^23
  return (value + kShift) - kShift;
}

// Returns a number in [-0.5, 0.5] that looks drawn by chance.
TRIREME_INLINE float noise(uint32_t seed, uint32_t place) {
  return static_cast<float>(static_cast<int32_t>(random_bits(seed, place))) * 0x1p-32F;
}

template <bool kResidual>
TRIREME_INLINE float value_at(const float* values, const float* residual, int64_t i) {
  if constexpr (kResidual) return values[i] + residual[i];
  return values[i];
}

// Keeps a block whole in the residual: its code says nothing.
template <bool kResidual>
TRIREME_INLINE void keep(const float* __restrict values, float* __restrict residual,
                         int64_t count) {
  if constexpr (kResidual)
    for (int64_t i = 0; i < count; ++i) residual[i] += values[i];
}

// Returns the bits of the largest size: above kInfinityBits for a NaN. Sizes of floats are in the
// order of their bits.
template <bool kResidual>
TRIREME_INLINE uint32_t largest_bits(const float* values, const float* residual, int64_t count) {
  int32_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float p = value_at<kResidual>(values, residual, i);
    const auto bits = static_cast<int32_t>(std::bit_cast<uint32_t>(p) & kSizeBits);
    most = bits > most ? bits : most;
  }
  return static_cast<uint32_t>(most);
}

template <bool kResidual>
TRIREME_INLINE float sum_of_sizes(const float* values, const float* residual, int64_t count) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const float p = value_at<kResidual>(values, residual, i + lane);
      lanes[lane] += std::bit_cast<float>(std::bit_cast<uint32_t>(p) & kSizeBits);
    }
  for (int64_t lane = 0; i + lane < count; ++lane) {
    const float p = value_at<kResidual>(values, residual, i + lane);
    lanes[lane] += std::bit_cast<float>(std::bit_cast<uint32_t>(p) & kSizeBits);
  }
  for (int64_t width = kLanes / 2; width > 0; width /= 2)
    for (int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return lanes[0];
}

struct Steps {
  float per_one;  // steps of the code per unit of value
  float one;      // the value of one step
};

template <bool kResidual, bool kDither>
TRIREME_INLINE void quantize(const float* __restrict values, float* __restrict residual,
                             int8_t* __restrict codes, int64_t count, Steps steps, float top,
                             uint32_t seed, uint32_t place) {
  for (int64_t i = 0; i < count; ++i) {
    const float p = value_at<kResidual>(values, residual, i);
    float step = p * steps.per_one;
    if constexpr (kDither) step += noise(seed, place + static_cast<uint32_t>(i));
    step = rounded(step);
    step = step > top ? top : step;
    step = step < -top ? -top : step;
    codes[i] = static_cast<int8_t>(static_cast<int32_t>(step));
    if constexpr (kResidual) residual[i] = p - step * steps.one;
  }
}

// Packs numbers of 4 bits, the lower half of a byte first.
TRIREME_INLINE void pack_halves(std::byte* __restrict to, const int8_t* __restrict from,
                                int64_t count) {
  for (int64_t i = 0; i < count / 2; ++i) {
    const auto low = static_cast<uint8_t>(from[2 * i]) & 15U;
    const auto high = static_cast<uint8_t>(from[2 * i + 1]) & 15U;
    to[i] = static_cast<std::byte>(low | (high << 4));
  }
  if (count % 2 != 0)
    to[count / 2] = static_cast<std::byte>(static_cast<uint8_t>(from[count - 1]) & 15U);
}

template <BlockKind kKind, bool kResidual, bool kDither>
TRIREME_INLINE float encode_steps(const BlockEncoding& blocks, int64_t begin, int64_t count,
                                  std::byte* code) {
  constexpr float kTop = kKind == BlockKind::kInt8 ? 127.0F : 7.0F;
  constexpr int64_t kPerByte = kKind == BlockKind::kInt8 ? 1 : 2;
  const float* values = blocks.values + begin;
  float* residual = kResidual ? blocks.residual + begin : nullptr;
  const uint32_t bits = largest_bits<kResidual>(values, residual, count);
  const auto most = std::bit_cast<float>(bits);
  const Steps steps{kTop / most, most / kTop};
  const bool is_finite = bits < kInfinityBits;
  if (!is_finite || most == 0 || std::bit_cast<uint32_t>(steps.per_one) >= kInfinityBits) {
    std::fill_n(code, (count + kPerByte - 1) / kPerByte, std::byte{0});
    if (is_finite) keep<kResidual>(values, residual, count);
    return is_finite ? 0.0F : kNan;
  }
  for (int64_t i = 0; i < count; i += kPiece) {
    const int64_t piece = std::min(kPiece, count - i);
    const auto place = static_cast<uint32_t>(blocks.begin + begin + i);
    const uint32_t seed = kDither ? *blocks.dither : 0;
    float* rest = kResidual ? residual + i : nullptr;
    if constexpr (kKind == BlockKind::kInt8) {
      quantize<kResidual, kDither>(values + i, rest, reinterpret_cast<int8_t*>(code + i), piece,
                                   steps, kTop, seed, place);
    } else {
      int8_t whole[kPiece];
      quantize<kResidual, kDither>(values + i, rest, whole, piece, steps, kTop, seed, place);
      pack_halves(code + i / 2, whole, piece);
    }
  }
  return steps.one;
}

template <bool kResidual>
TRIREME_INLINE void take_signs(const float* __restrict values, float* __restrict residual,
                               uint8_t* __restrict negative, int64_t count, float size) {
  for (int64_t i = 0; i < count; ++i) {
    const float p = value_at<kResidual>(values, residual, i);
    const bool is_negative = p < 0;
    negative[i] = static_cast<uint8_t>(is_negative);
    if constexpr (kResidual) residual[i] = p - (is_negative ? -size : size);
  }
}

// Packs eight bytes that are 0 or 1 into one, the first as its lowest bit.
TRIREME_INLINE void pack_bits(std::byte* __restrict to, const uint8_t* __restrict from,
                              int64_t count) {
  for (int64_t i = 0; i < (count + 7) / 8; ++i) {
    uint64_t eight = 0;
    std::memcpy(&eight, from + 8 * i, 8);
    if constexpr (std::endian::native == std::endian::big) eight = __builtin_bswap64(eight);
    to[i] = static_cast<std::byte>((eight * 0x0102040810204080ULL) >> 56);
  }
}

template <bool kResidual>
TRIREME_INLINE float encode_signs(const BlockEncoding& blocks, int64_t begin, int64_t count,
                                  std::byte* code) {
  const float* values = blocks.values + begin;
  float* residual = kResidual ? blocks.residual + begin : nullptr;
  const float sum = sum_of_sizes<kResidual>(values, residual, count);
  if (std::bit_cast<uint32_t>(sum) >= kInfinityBits) {
    std::fill_n(code, (count + 7) / 8, std::byte{0});
    return kNan;
  }
  const float size = sum / static_cast<float>(count);
  for (int64_t i = 0; i < count; i += kPiece) {
    const int64_t piece = std::min(kPiece, count - i);
    uint8_t negative[kPiece];
    take_signs<kResidual>(values + i, kResidual ? residual + i : nullptr, negative, piece, size);
    std::fill(negative + piece, negative + (piece + 7) / 8 * 8, uint8_t{0});
    pack_bits(code + i / 8, negative, piece);
  }
  return size;
}

template <BlockKind kKind>
constexpr int64_t bytes_of_block(int64_t count) {
  if constexpr (kKind == BlockKind::kInt8) return count;
  if constexpr (kKind == BlockKind::kInt4) return (count + 1) / 2;
  return (count + 7) / 8;
}

template <BlockKind kKind, bool kResidual, bool kDither>
TRIREME_INLINE void encode_blocks(const BlockEncoding& blocks) {
  const int64_t stride = bytes_of_block<kKind>(blocks.block);
  int64_t number = 0;
  for (int64_t begin = 0; begin < blocks.numel; begin += blocks.block, ++number) {
    const int64_t count = std::min(blocks.block, blocks.numel - begin);
    std::byte* code = blocks.codes + number * stride;
    if constexpr (kKind == BlockKind::kSign) {
      blocks.scales[number] = encode_signs<kResidual>(blocks, begin, count, code);
    } else {
      blocks.scales[number] = encode_steps<kKind, kResidual, kDither>(blocks, begin, count, code);
    }
  }
}

template <typename Isa, BlockKind kKind>
void encode_by(const BlockEncoding& blocks) {
  const bool has_dither = blocks.dither.has_value() && kKind != BlockKind::kSign;
  Isa::run([&]() __attribute__((always_inline)) {
    if (blocks.residual != nullptr)
      return has_dither ? encode_blocks<kKind, true, true>(blocks)
                        : encode_blocks<kKind, true, false>(blocks);
    has_dither ? encode_blocks<kKind, false, true>(blocks)
               : encode_blocks<kKind, false, false>(blocks);
  });
}

// Unpacks `count` values, a multiple of 8 except at the end of a block, as whole steps or signs.
template <BlockKind kKind>
TRIREME_INLINE void add_piece(float* __restrict sum, const std::byte* __restrict code,
                              int64_t count, float scale) {
  if constexpr (kKind == BlockKind::kInt8) {
    const auto* steps = reinterpret_cast<const int8_t*>(code);
    for (int64_t i = 0; i < count; ++i) sum[i] += static_cast<float>(steps[i]) * scale;
  } else if constexpr (kKind == BlockKind::kInt4) {
    const auto step_of = [](uint32_t half) {
      return static_cast<float>(static_cast<int32_t>(half ^ 8U) - 8);
    };
    for (int64_t i = 0; i < count / 2; ++i) {
      const auto both = static_cast<uint32_t>(code[i]);
      sum[2 * i] += step_of(both & 15U) * scale;
      sum[2 * i + 1] += step_of(both >> 4) * scale;
    }
    if (count % 2 != 0)
      sum[count - 1] += step_of(static_cast<uint32_t>(code[count / 2]) & 15U) * scale;
  } else {
    const uint32_t size = std::bit_cast<uint32_t>(scale);
    const auto sign_of = [&](uint32_t bits, int64_t place) {
      return std::bit_cast<float>(size ^ (((bits >> place) & 1U) << 31));
    };
    for (int64_t i = 0; i < count / 8; ++i) {
      const auto bits = static_cast<uint32_t>(code[i]);
      for (int64_t place = 0; place < 8; ++place) sum[8 * i + place] += sign_of(bits, place);
    }
    for (int64_t i = count / 8 * 8; i < count; ++i)
      sum[i] += sign_of(static_cast<uint32_t>(code[i / 8]), i % 8);
  }
}

template <BlockKind kKind>
TRIREME_INLINE void decode_blocks(const BlockDecoding& blocks) {
  const int64_t stride = bytes_of_block<kKind>(blocks.block);
  const int64_t scales_bytes = blocks.blocks * static_cast<int64_t>(sizeof(float));
  int64_t number = blocks.first;
  for (int64_t begin = 0; begin < blocks.numel; begin += blocks.block, ++number) {
    const int64_t count = std::min(blocks.block, blocks.numel - begin);
    for (int64_t i = 0; i < count; i += kPiece) {
      const int64_t piece = std::min(kPiece, count - i);
      float sum[kPiece] = {};
      for (const std::byte* code : blocks.codes) {
        float scale = 0;
        std::memcpy(&scale, code + number * static_cast<int64_t>(sizeof(float)), sizeof(float));
        const std::byte* block = code + scales_bytes + number * stride;
        add_piece<kKind>(sum, block + bytes_of_block<kKind>(i), piece, scale);
      }
      float* to = blocks.to + begin + i;
      for (int64_t k = 0; k < piece; ++k) to[k] = sum[k] * blocks.factor;
    }
  }
}

template <typename Isa, BlockKind kKind>
void decode_by(const BlockDecoding& blocks) {
  Isa::run([&]() __attribute__((always_inline)) { decode_blocks<kKind>(blocks); });
}

template <typename Isa>
BlockLoops block_loops_of(Isa /*isa*/) {
  constexpr BlockKind k8 = BlockKind::kInt8;
  constexpr BlockKind k4 = BlockKind::kInt4;
  constexpr BlockKind kS = BlockKind::kSign;
  return {Isa::kName,
          {encode_by<Isa, k8>, encode_by<Isa, k4>, encode_by<Isa, kS>},
          {decode_by<Isa, k8>, decode_by<Isa, k4>, decode_by<Isa, kS>}};
}

}  // namespace

std::span<const BlockLoops> supported_block_loops() {
  static const auto supported = supported_loops<Isas>([](auto isa) { return block_loops_of(isa); });
  return supported;
}

}  // namespace trireme::cpu
