#include <trireme/kernels/cpu/convert.h>

#include <trireme/common/half.h>
#include <trireme/common/isa.h>

#include <algorithm>
#include <type_traits>

// Loops are written once, as plain C++ that compilers vectorise, and compiled once per instruction
// set.
namespace trireme::cpu {
namespace {

// The number of fp16 elements that pass through a buffer of fp32 at a time: two such buffers stay
// in the nearest cache.
constexpr int64_t kConvertBlock = 512;

template <typename Dst, typename Src>
using Compute =
    std::conditional_t<std::is_same_v<Dst, double> || std::is_same_v<Src, double>, double, float>;

template <typename Dst, typename Value>
TRIREME_INLINE Dst cast(Value value) {
  if constexpr (std::is_same_v<Value, BFloat16>) {
    return static_cast<Dst>(to_float(value));
  } else if constexpr (std::is_same_v<Dst, BFloat16>) {
    return to_bfloat16(static_cast<float>(value));
  } else {
    return static_cast<Dst>(value);
  }
}

template <typename Dst, typename Src>
TRIREME_INLINE void scale_apart(Dst* __restrict dst, const Src* __restrict src, int64_t numel,
                                Compute<Dst, Src> scale) {
  for (int64_t i = 0; i < numel; ++i) {
    dst[i] = cast<Dst>(cast<Compute<Dst, Src>>(src[i]) * scale);
  }
}

template <typename T>
TRIREME_INLINE void scale_in_place(T* data, int64_t numel, Compute<T, T> scale) {
  for (int64_t i = 0; i < numel; ++i) {
    data[i] = cast<T>(cast<Compute<T, T>>(data[i]) * scale);
  }
}

template <typename T>
TRIREME_INLINE void add_apart(T* __restrict dst, const T* __restrict src, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    dst[i] = cast<T>(cast<Compute<T, T>>(dst[i]) + cast<Compute<T, T>>(src[i]));
  }
}

// Calls piece(begin, numel) for consecutive blocks.
template <typename Piece>
TRIREME_INLINE void for_blocks(int64_t numel, const Piece& piece) {
  for (int64_t begin = 0; begin < numel; begin += kConvertBlock) {
    piece(begin, std::min(kConvertBlock, numel - begin));
  }
}

template <typename Isa, typename Dst, typename Src>
void convert(void* dst_data, const void* src_data, int64_t numel, double scale) {
  auto* dst = static_cast<Dst*>(dst_data);
  const auto* src = static_cast<const Src*>(src_data);
  if constexpr (std::is_same_v<Dst, Half> && std::is_same_v<Src, float>) {
    Isa::narrow(dst, src, numel, static_cast<float>(scale));
  } else if constexpr (std::is_same_v<Dst, float> && std::is_same_v<Src, Half>) {
    Isa::widen(dst, src, numel, static_cast<float>(scale));
  } else if constexpr (std::is_same_v<Dst, Half>) {
    for_blocks(numel, [&](int64_t begin, int64_t count) {
      float wide[kConvertBlock];
      convert<Isa, float, Src>(wide, src + begin, count, scale);
      Isa::narrow(dst + begin, wide, count, 1.0f);
    });
  } else if constexpr (std::is_same_v<Src, Half>) {
    for_blocks(numel, [&](int64_t begin, int64_t count) {
      float wide[kConvertBlock];
      Isa::widen(wide, src + begin, count, 1.0f);
      convert<Isa, Dst, float>(dst + begin, wide, count, scale);
    });
  } else {
    const auto factor = static_cast<Compute<Dst, Src>>(scale);
    Isa::run([&]() __attribute__((always_inline)) {
      if constexpr (std::is_same_v<Dst, Src>) {
        if (dst == src) return scale_in_place(dst, numel, factor);
      }
      scale_apart(dst, src, numel, factor);
    });
  }
}

template <typename Isa, typename T>
void add(void* dst_data, const void* src_data, int64_t numel) {
  auto* dst = static_cast<T*>(dst_data);
  const auto* src = static_cast<const T*>(src_data);
  if constexpr (std::is_same_v<T, Half>) {
    for_blocks(numel, [&](int64_t begin, int64_t count) {
      float sum[kConvertBlock];
      float wide[kConvertBlock];
      Isa::widen(sum, dst + begin, count, 1.0f);
      Isa::widen(wide, src + begin, count, 1.0f);
      add<Isa, float>(sum, wide, count);
      Isa::narrow(dst + begin, sum, count, 1.0f);
    });
  } else {
    Isa::run([&]() __attribute__((always_inline)) { add_apart(dst, src, numel); });
  }
}

// The loops in the order of Real.
template <typename Isa, typename Dst>
constexpr std::array<ConvertLoop, kReals> kConvertRow = {
    &convert<Isa, Dst, float>, &convert<Isa, Dst, double>, &convert<Isa, Dst, Half>,
    &convert<Isa, Dst, BFloat16>};

template <typename Isa>
constexpr ConvertLoops kLoopsOf = {
    Isa::kName,
    {kConvertRow<Isa, float>, kConvertRow<Isa, double>, kConvertRow<Isa, Half>,
     kConvertRow<Isa, BFloat16>},
    {&add<Isa, float>, &add<Isa, double>, &add<Isa, Half>, &add<Isa, BFloat16>}};

}  // namespace

c10::ArrayRef<ConvertLoops> supported_convert_loops() {
  static const auto loops = supported_loops<Isas>([](auto isa) { return kLoopsOf<decltype(isa)>; });
  return loops;
}

}  // namespace trireme::cpu
