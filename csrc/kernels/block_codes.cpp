#include <trireme/kernels/block_codes.h>

#include <trireme/kernels/cpu/parallel.h>

#include <algorithm>

namespace trireme {
namespace {

constexpr auto kScaleBytes = static_cast<int64_t>(sizeof(float));

int64_t bytes_of_values(BlockKind kind, int64_t count) {
  constexpr int64_t kPerByte[] = {1, 2, 8};
  const int64_t per_byte = kPerByte[static_cast<size_t>(kind)];
  return (count + per_byte - 1) / per_byte;
}

const cpu::BlockLoops& best_loops() {
  static const cpu::BlockLoops& best = cpu::supported_block_loops().back();
  return best;
}

// Calls body(first block, begin, numel) for runs of whole blocks, on several threads if it pays.
void for_blocks(const BlockFormat& format, int64_t numel,
                c10::function_ref<void(int64_t, int64_t, int64_t)> body) {
  const int64_t grain = std::max<int64_t>(1, cpu::kGrain / format.block);
  cpu::for_ranges(
      format.blocks(numel),
      [&](int64_t first, int64_t end) {
        const int64_t begin = first * format.block;
        body(first, begin, std::min(end * format.block, numel) - begin);
      },
      grain);
}

}  // namespace

int64_t code_bytes(const BlockFormat& format, int64_t numel) {
  const int64_t whole = numel / format.block;
  return format.blocks(numel) * kScaleBytes + whole * bytes_of_values(format.kind, format.block) +
         bytes_of_values(format.kind, numel - whole * format.block);
}

void encode(const BlockFormat& format, const BlockValues& from, std::byte* code) {
  const int64_t stride = bytes_of_values(format.kind, format.block);
  auto* scales = reinterpret_cast<float*>(code);
  std::byte* codes = code + format.blocks(from.numel) * kScaleBytes;
  const cpu::EncodeLoop loop = best_loops().encode[static_cast<size_t>(format.kind)];
  for_blocks(format, from.numel, [&](int64_t first, int64_t begin, int64_t numel) {
    float* residual = from.residual != nullptr ? from.residual + begin : nullptr;
    loop({from.values + begin, residual, numel, format.block, scales + first,
          codes + first * stride, from.dither, from.first + begin});
  });
}

void decode(const BlockFormat& format, std::span<const std::byte* const> codes, float* to,
            int64_t numel, float factor) {
  const cpu::DecodeLoop loop = best_loops().decode[static_cast<size_t>(format.kind)];
  const int64_t blocks = format.blocks(numel);
  for_blocks(format, numel, [&](int64_t first, int64_t begin, int64_t count) {
    loop({to + begin, count, format.block, codes, blocks, first, factor});
  });
}

}  // namespace trireme
