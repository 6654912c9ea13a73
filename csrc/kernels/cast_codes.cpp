#include <trireme/kernels/cast_codes.h>

#include <trireme/kernels/cpu/parallel.h>
#include <trireme/kernels/cpu/runs.h>

#include <algorithm>
#include <bit>
#include <cstdint>

namespace trireme {
namespace {

constexpr int64_t kPiece = 512;  // values on the stack at a time

// Keeps in the residual what a piece of the code leaves out of `sums`. What is not finite leaves no
// finite rest.
void keep_rest(float* __restrict residual, const float* __restrict sums,
               const float* __restrict decoded, int64_t count) {
  constexpr uint32_t kExponent = 0x7f800000;
  for (int64_t i = 0; i < count; ++i) {
    const float rest = sums[i] - decoded[i];
    const bool is_finite = (std::bit_cast<uint32_t>(rest) & kExponent) != kExponent;
    residual[i] = is_finite ? rest : residual[i];
  }
}

void encode_piece(const float* values, float* residual, Span code, double factor) {
  float sums[kPiece];
  float decoded[kPiece];
  for (int64_t i = 0; i < code.numel; ++i) sums[i] = values[i] + residual[i];
  cpu::copy_run(code, {sums, at::kFloat, code.numel}, factor);
  cpu::copy_run({decoded, at::kFloat, code.numel}, code, 1 / factor);
  keep_rest(residual, sums, decoded, code.numel);
}

// Calls body(begin, end) for pieces that cover [0, numel), on several threads if it pays.
void for_pieces(int64_t numel, c10::function_ref<void(int64_t begin, int64_t end)> body) {
  cpu::for_ranges(numel, [&](int64_t first, int64_t last) {
    for (int64_t begin = first; begin < last; begin += kPiece)
      body(begin, std::min(begin + kPiece, last));
  });
}

}  // namespace

void encode(const CastValues& from, Span code, double factor) {
  if (from.residual == nullptr)
    return scaled_copy(code, {from.values, at::kFloat, code.numel}, factor);
  for_pieces(code.numel, [&](int64_t begin, int64_t end) {
    encode_piece(from.values + begin, from.residual + begin, slice(code, begin, end), factor);
  });
}

void decode(std::span<const ConstSpan> codes, Span to, double factor) {
  for_pieces(to.numel, [&](int64_t begin, int64_t end) {
    float sums[kPiece];
    const Span sum{sums, at::kFloat, end - begin};
    cpu::copy_run(sum, slice(codes.front(), begin, end), 1);
    for (const ConstSpan& code : codes.subspan(1)) cpu::add_run(sum, slice(code, begin, end), 1);
    cpu::copy_run(slice(to, begin, end), sum, factor);
  });
}

}  // namespace trireme
