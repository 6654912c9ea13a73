#pragma once

#include <trireme/common/half.h>

#include <cstdint>
#include <cstring>
#include <string_view>
#include <tuple>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

// The instruction sets that one binary carries loops for. Each type below compiles a generic body
// for its set (`run`), and does what compilers do not do by themselves: multiplies runs of fp16
// into fp32 (`widen`) and back (`narrow`), which x86 has instructions for, writes past the caches
// (`stream`), and fuses a product into a sum (`multiply_add`). All but the last give the same bits,
// save those of a NaN, as long as a body never adds to a product: all sets but SSE2 would fuse the
// two and round once.
namespace trireme::cpu {

TRIREME_INLINE float fused_multiply_add(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}
TRIREME_INLINE double fused_multiply_add(double a, double b, double c) {
  return __builtin_fma(a, b, c);
}

// The set that the compiler assumes: SSE2 on x86-64, NEON on 64-bit Arm.
struct Baseline {
  static constexpr std::string_view kName = "baseline";
  static bool supported() { return true; }

  template <typename Body>
  static void run(const Body& body) {
    body();
  }

  // Returns a * b + c, rounded once where the set has an instruction for it, else twice, as torch's
  // loops do.
  template <typename T>
  TRIREME_INLINE static T multiply_add(T a, T b, T c) {
#if defined(__FP_FAST_FMAF)
    return fused_multiply_add(a, b, c);
#else
    return a * b + c;
#endif
  }

  static void widen(float* to, const Half* from, int64_t numel, float scale) {
    for (int64_t i = 0; i < numel; ++i) to[i] = to_float(from[i]) * scale;
  }
  static void narrow(Half* to, const float* from, int64_t numel, float scale) {
    for (int64_t i = 0; i < numel; ++i) to[i] = to_half(from[i] * scale);
  }

  // Copies whole lines of 64 bytes to an address that is a multiple of 64. Other threads may read
  // them after stream_fence() and an ordinary release.
  static void stream(void* to, const void* from, int64_t bytes) {
#if defined(__x86_64__)
    auto* out = static_cast<__m128i*>(to);
    const auto* in = static_cast<const __m128i*>(from);
    for (int64_t i = 0; i < bytes / 16; ++i) _mm_stream_si128(out + i, _mm_loadu_si128(in + i));
#else
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
#endif
  }
};

#if defined(__x86_64__)

#define TRIREME_AVX2 __attribute__((target("avx2,fma,f16c")))
#define TRIREME_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")))

struct Avx2 {
  static constexpr std::string_view kName = "avx2";
  static bool supported() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    // Checked by hand: older compilers do not know the name "f16c".
    const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
    return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  }

  template <typename Body>
  TRIREME_AVX2 static void run(const Body& body) {
    body();
  }

  template <typename T>
  TRIREME_INLINE static T multiply_add(T a, T b, T c) {
    return fused_multiply_add(a, b, c);
  }

  TRIREME_AVX2 static void widen(float* to, const Half* from, int64_t numel, float scale) {
    const __m256 factor = _mm256_set1_ps(scale);
    int64_t i = 0;
    for (; i + 8 <= numel; i += 8) {
      const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
      _mm256_storeu_ps(to + i, _mm256_mul_ps(_mm256_cvtph_ps(halves), factor));
    }
    for (; i < numel; ++i) to[i] = _cvtsh_ss(from[i].bits) * scale;
  }

  TRIREME_AVX2 static void narrow(Half* to, const float* from, int64_t numel, float scale) {
    constexpr int kRounding = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const __m256 factor = _mm256_set1_ps(scale);
    int64_t i = 0;
    for (; i + 8 <= numel; i += 8) {
      const __m256 floats = _mm256_mul_ps(_mm256_loadu_ps(from + i), factor);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(floats, kRounding));
    }
    for (; i < numel; ++i) to[i].bits = _cvtss_sh(from[i] * scale, kRounding);
  }

  TRIREME_AVX2 static void stream(void* to, const void* from, int64_t bytes) {
    auto* out = static_cast<__m256i*>(to);
    const auto* in = static_cast<const __m256i*>(from);
    for (int64_t i = 0; i < bytes / 32; ++i) {
      _mm256_stream_si256(out + i, _mm256_loadu_si256(in + i));
    }
  }
};

struct Avx512 {
  static constexpr std::string_view kName = "avx512";
  static bool supported() {
    return Avx2::supported() && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq");
  }

  template <typename Body>
  TRIREME_AVX512 static void run(const Body& body) {
    body();
  }

  template <typename T>
  TRIREME_INLINE static T multiply_add(T a, T b, T c) {
    return fused_multiply_add(a, b, c);
  }

  // Eight at a time already keep up with the nearest cache.
  static void widen(float* to, const Half* from, int64_t numel, float scale) {
    Avx2::widen(to, from, numel, scale);
  }
  static void narrow(Half* to, const float* from, int64_t numel, float scale) {
    Avx2::narrow(to, from, numel, scale);
  }

  TRIREME_AVX512 static void stream(void* to, const void* from, int64_t bytes) {
    auto* out = static_cast<__m512i*>(to);
    const auto* in = static_cast<const __m512i*>(from);
    for (int64_t i = 0; i < bytes / 64; ++i) {
      _mm512_stream_si512(out + i, _mm512_loadu_si512(in + i));
    }
  }
};

using Isas = std::tuple<Baseline, Avx2, Avx512>;  // the fastest last

#else

using Isas = std::tuple<Baseline>;

#endif  // __x86_64__

// Returns what `loops_of` makes of each of these sets that the processor has, the fastest last. It
// is called with an object of the set's type.
template <typename Sets, typename LoopsOf>
auto supported_loops(const LoopsOf& loops_of) {
  std::vector<decltype(loops_of(Baseline()))> found;
  const auto add = [&](auto isa) {
    if (isa.supported()) found.push_back(loops_of(isa));
  };
  std::apply([&](auto... isas) { (add(isas), ...); }, Sets());
  return found;
}

// Makes later ordinary stores visible only after the streamed ones before them.
inline void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace trireme::cpu
