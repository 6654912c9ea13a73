#include <trireme/common/isa.h>
#include <trireme/kernels/sparse_codes.h>

#include <algorithm>
#include <bit>
#include <cstring>

// Loops are written once, as plain C++ that compilers vectorise, and compiled once per instruction
// set. No product is fused into a sum in this file, so that all sets give the same bits.
namespace trireme::cpu {
namespace {

constexpr int64_t kPiece = 512;  // values on the stack at a time
constexpr uint32_t kSizeBits = 0x7fffffff;

template <bool kResidual>
TRIREME_INLINE float sum_at(const SparseSums& from, int64_t i) {
  if constexpr (kResidual) return from.values[i] + from.decay * from.residual[i];
  return from.values[i];
}

TRIREME_INLINE int32_t size_bits(float value) {
  return static_cast<int32_t>(std::bit_cast<uint32_t>(value) & kSizeBits);
}

template <bool kResidual>
TRIREME_INLINE int32_t largest(const SparseSums& from) {
  int32_t most = 0;
  for (int64_t i = 0; i < from.numel; ++i) {
    const int32_t bits = size_bits(sum_at<kResidual>(from, i));
    most = bits > most ? bits : most;
  }
  return most;
}

// Calls take(i) for each of eight bytes that is 1, the first one first.
template <typename Take>
TRIREME_INLINE void for_set(uint64_t eight, const Take& take) {
  if constexpr (std::endian::native == std::endian::big) eight = __builtin_bswap64(eight);
  for (; eight != 0; eight &= eight - 1) take(std::countr_zero(eight) / 8);
}

// The sums of a piece, which are its rest too, and which of them are large enough.
template <bool kResidual>
TRIREME_INLINE void add_up(const SparseSums& from, int64_t begin, int64_t count, int32_t least,
                           float* __restrict sums, uint8_t* __restrict is_large) {
  const float* __restrict values = from.values + begin;
  float* __restrict residual = kResidual ? from.residual + begin : nullptr;
  for (int64_t i = 0; i < count; ++i) {
    float sum = values[i];
    if constexpr (kResidual) sum += from.decay * residual[i];
    sums[i] = sum;
    is_large[i] = static_cast<uint8_t>(size_bits(sum) >= least);
    if constexpr (kResidual) residual[i] = sum;
  }
}

template <bool kResidual>
TRIREME_INLINE int64_t take_large(const SparseSums& from, float threshold, const SparsePicks& to) {
  const int32_t least = std::max(size_bits(threshold), 1);  // no zeros
  int64_t taken = 0;
  for (int64_t begin = 0; begin < from.numel; begin += kPiece) {
    const int64_t count = std::min(kPiece, from.numel - begin);
    float sums[kPiece];
    uint8_t is_large[kPiece];
    add_up<kResidual>(from, begin, count, least, sums, is_large);
    std::fill(is_large + count, is_large + (count + 7) / 8 * 8, uint8_t{0});
    for (int64_t i = 0; i < count; i += 8) {
      uint64_t eight = 0;
      std::memcpy(&eight, is_large + i, sizeof(eight));
      for_set(eight, [&](int64_t lane) {
        if (taken == to.room) return;
        to.values[taken] = sums[i + lane];
        to.places[taken++] = static_cast<uint32_t>(begin + i + lane);
        if constexpr (kResidual) from.residual[begin + i + lane] = 0;
      });
    }
  }
  return taken;
}

template <typename Isa>
int32_t largest_by(const SparseSums& from) {
  int32_t most = 0;
  Isa::run([&]() __attribute__((always_inline)) {
    most = from.residual != nullptr ? largest<true>(from) : largest<false>(from);
  });
  return most;
}

template <typename Isa>
int64_t take_large_by(const SparseSums& from, float threshold, const SparsePicks& to) {
  int64_t taken = 0;
  Isa::run([&]() __attribute__((always_inline)) {
    taken = from.residual != nullptr ? take_large<true>(from, threshold, to)
                                     : take_large<false>(from, threshold, to);
  });
  return taken;
}

template <typename Isa>
SparseLoops sparse_loops_of(Isa /*isa*/) {
  return {Isa::kName, largest_by<Isa>, take_large_by<Isa>};
}

}  // namespace

std::span<const SparseLoops> supported_sparse_loops() {
  static const auto supported =
      supported_loops<Isas>([](auto isa) { return sparse_loops_of(isa); });
  return supported;
}

}  // namespace trireme::cpu
