#pragma once

#include <c10/util/Half.h>

#include <cstdint>
#include <string_view>
#include <tuple>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

// The instruction sets that one binary carries loops for. Each type below compiles a generic body
// for its set (`run`), and multiplies runs of fp16 into fp32 (`widen`) and back (`narrow`), which
// compilers do not vectorise by themselves on x86.
namespace trireme::cpu {

// What the compiler was told to assume: SSE2 on x86-64, NEON on 64-bit Arm.
struct Baseline {
  static constexpr std::string_view kName = "baseline";
  static bool supported() { return true; }

  template <typename Body>
  static void run(const Body& body) {
    body();
  }

  static void widen(float* to, const c10::Half* from, int64_t numel, float scale) {
    for (int64_t i = 0; i < numel; ++i) to[i] = static_cast<float>(from[i]) * scale;
  }
  static void narrow(c10::Half* to, const float* from, int64_t numel, float scale) {
    for (int64_t i = 0; i < numel; ++i) to[i] = from[i] * scale;
  }
};

#if defined(__x86_64__)

#define TRIREME_AVX2 __attribute__((target("avx2,f16c")))
#define TRIREME_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,f16c")))

struct Avx2 {
  static constexpr std::string_view kName = "avx2";
  static bool supported() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    // Asked by hand: older compilers do not know the name "f16c".
    const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
    return f16c && __builtin_cpu_supports("avx2");
  }

  template <typename Body>
  TRIREME_AVX2 static void run(const Body& body) {
    body();
  }

  TRIREME_AVX2 static void widen(float* to, const c10::Half* from, int64_t numel, float scale) {
    const __m256 factor = _mm256_set1_ps(scale);
    int64_t i = 0;
    for (; i + 8 <= numel; i += 8) {
      const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
      _mm256_storeu_ps(to + i, _mm256_mul_ps(_mm256_cvtph_ps(halves), factor));
    }
    for (; i < numel; ++i) to[i] = _cvtsh_ss(from[i].x) * scale;
  }

  TRIREME_AVX2 static void narrow(c10::Half* to, const float* from, int64_t numel, float scale) {
    constexpr int kRounding = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const __m256 factor = _mm256_set1_ps(scale);
    int64_t i = 0;
    for (; i + 8 <= numel; i += 8) {
      const __m256 floats = _mm256_mul_ps(_mm256_loadu_ps(from + i), factor);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(floats, kRounding));
    }
    for (; i < numel; ++i) to[i].x = _cvtss_sh(from[i] * scale, kRounding);
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

  // Eight at a time already keep up with the nearest cache.
  static void widen(float* to, const c10::Half* from, int64_t numel, float scale) {
    Avx2::widen(to, from, numel, scale);
  }
  static void narrow(c10::Half* to, const float* from, int64_t numel, float scale) {
    Avx2::narrow(to, from, numel, scale);
  }
};

using Isas = std::tuple<Baseline, Avx2, Avx512>;  // the fastest last

#else

using Isas = std::tuple<Baseline>;

#endif  // __x86_64__

}  // namespace trireme::cpu
