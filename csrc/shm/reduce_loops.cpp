#include <trireme/shm/reduce_loops.h>

#include <trireme/common/half.h>
#include <trireme/common/isa.h>
#include <trireme/shm/reduce_elements.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

// Loops are written once, as plain C++ that compilers vectorise, and compiled once per instruction
// set (isa.h). Sources are folded two at a time, block by block through a buffer in the nearest
// cache, and the last fold of a block writes to dst.
namespace trireme::shm {
namespace {

constexpr int64_t kVectorLine = 64;
// The bytes of one buffer of partial results; few, so that the processor's prefetching sees the
// sources side by side: with 8 sources in memory, 8 KiB take 1.7 times as long as 2 KiB.
constexpr int64_t kPartialBytes = 2048;

template <typename T>
constexpr int64_t kBlock = kPartialBytes / static_cast<int64_t>(sizeof(Computed<T>));

template <typename Out, typename A, typename B, typename Op>
TRIREME_INLINE void combine_apart(Out* __restrict out, const A* __restrict a, const B* __restrict b,
                                  int64_t count, Op op) {
  for (int64_t i = 0; i < count; ++i) out[i] = store<Out>(op(load(a[i]), load(b[i])));
}

template <typename T, typename B, typename Op>
TRIREME_INLINE void combine_in_place(T* __restrict data, const B* __restrict b, int64_t count,
                                     Op op) {
  for (int64_t i = 0; i < count; ++i) data[i] = store<T>(op(load(data[i]), load(b[i])));
}

// Computes out[i] = op(a[i], b[i]). `out` may be `a` or `b`. Not inlined: that would triple the
// code.
template <typename Isa, typename Out, typename A, typename B, typename Op>
[[gnu::noinline]] void combine(Out* out, const A* a, const B* b, int64_t count, Op op) {
  Isa::run([&]() __attribute__((always_inline)) {
    if constexpr (std::is_same_v<Out, A>) {
      if (out == a) return combine_in_place(out, b, count, op);
    }
    if constexpr (std::is_same_v<Out, B>) {
      const auto flipped = [op](auto x, auto y) __attribute__((always_inline)) { return op(y, x); };
      if (out == b) return combine_in_place(out, a, count, flipped);
    }
    combine_apart(out, a, b, count, op);
  });
}

// Keeps the compiler from fusing writes of `data` with the reads that follow: a product and a sum
// fused into one instruction round once, and not every instruction set has that one.
TRIREME_INLINE void compiler_fence(void* data) { asm volatile("" : : "r"(data) : "memory"); }

// Computes to[i] = factor * from[i], as numbers to compute with.
template <typename Isa, typename T>
void stage(Computed<T>* __restrict to, const T* __restrict from, int64_t count,
           Computed<T> factor) {
  if constexpr (std::is_same_v<T, Half>) {
    Isa::widen(to, from, count, factor);
  } else {
    Isa::run([&]() __attribute__((always_inline)) {
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<Computed<T>>(load(from[i]) * factor);
    });
  }
  compiler_fence(to);
}

template <typename Isa, typename T>
void round_to(T* __restrict to, const Computed<T>* __restrict from, int64_t count) {
  if constexpr (std::is_same_v<T, Half>) {
    Isa::narrow(to, from, count, 1.0f);
  } else {
    Isa::run([&]() __attribute__((always_inline)) {
      for (int64_t i = 0; i < count; ++i) to[i] = store<T>(from[i]);
    });
  }
}

// Computes (ac - bd) + (ad + bc)i; `count` is at most a block. `out` may be `a` or `b`.
template <typename Isa, typename Real>
void multiply(Complex<Real>* out, const Complex<Real>* a, const Complex<Real>* b, int64_t count) {
  Real products[4][kBlock<Complex<Real>>];
  Isa::run([&]() __attribute__((always_inline)) {
    for (int64_t i = 0; i < count; ++i) {
      products[0][i] = a[i].real * b[i].real;
      products[1][i] = a[i].imaginary * b[i].imaginary;
      products[2][i] = a[i].real * b[i].imaginary;
      products[3][i] = a[i].imaginary * b[i].real;
    }
  });
  compiler_fence(products);
  Isa::run([&]() __attribute__((always_inline)) {
    for (int64_t i = 0; i < count; ++i) {
      out[i].real = products[0][i] - products[1][i];
      out[i].imaginary = products[2][i] + products[3][i];
    }
  });
}

int64_t past_line(const void* address) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(address) % kVectorLine);
}

template <typename Isa>
void stream(void* dst, const void* src, int64_t bytes) {
  auto* to = static_cast<char*>(dst);
  const auto* from = static_cast<const char*>(src);
  const int64_t head = std::min(bytes, (kVectorLine - past_line(to)) % kVectorLine);
  const int64_t lines = (bytes - head) / kVectorLine * kVectorLine;
  copy(to, from, head);
  Isa::stream(to + head, from + head, lines);
  copy(to + head + lines, from + head + lines, bytes - head - lines);
}

template <typename Isa>
void copy_streaming_by(void* dst, const void* src, int64_t bytes) {
  stream<Isa>(dst, src, bytes);
  cpu::stream_fence();
}

// One reduction, in elements of the type that the loops see.
struct Job {
  void* dst;
  void* second;
  bool stream_second;
  int64_t numel;
  std::span<const void* const> sources;
  const double* factors;
  uint64_t terms;  // terms of an average

  template <typename T>
  const T* source(size_t rank, int64_t begin) const {
    return static_cast<const T*>(sources[rank]) + begin;
  }
  // Returns a job over the same memory as elements of which `parts` make one.
  Job in_parts(int64_t parts) const {
    Job job = *this;
    job.numel *= parts;
    return job;
  }
};

// Calls fill(out, begin, count) for consecutive blocks, to write `count` elements to `out`, the
// place of element `begin` in dst; then copies them to `second`, while they are in the nearest
// cache.
template <typename Isa, typename T, typename Fill>
void for_blocks(const Job& job, const Fill& fill) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(T));
  T* const dst = static_cast<T*>(job.dst);
  T* const second = static_cast<T*>(job.second);
  // The first block is short, so that the others begin on a line of `second`: streamed in two
  // parts, a line would cost two writes.
  int64_t block = kBlock<T> - past_line(second) / kBytes;
  for (int64_t begin = 0; begin < job.numel; begin += block, block = kBlock<T>) {
    const int64_t count = std::min(block, job.numel - begin);
    fill(dst + begin, begin, count);
    if (second == nullptr) continue;
    if (job.stream_second) {
      stream<Isa>(second + begin, dst + begin, count * kBytes);
    } else {
      copy(second + begin, dst + begin, count * kBytes);
    }
  }
}

// Copies one source that stays as it is.
template <typename Isa>
void move(const Job& job) {
  for_blocks<Isa, char>(job, [&](char* out, int64_t begin, int64_t count) {
    const auto* from = job.source<char>(0, begin);
    if (out != from) copy(out, from, count);
  });
}

// Folds sources that are first scaled, or widened, into a buffer.
template <typename Isa, typename T, typename Op, typename Last>
void fold_staged(const Job& job, Op op, Last last) {
  using C = Computed<T>;
  const size_t ranks = job.sources.size();
  const auto factor = [&](size_t rank) {
    return job.factors == nullptr ? C{1} : static_cast<C>(job.factors[rank]);
  };
  for_blocks<Isa, T>(job, [&](T* out, int64_t begin, int64_t count) {
    C result[kBlock<T>];
    C term[kBlock<T>];
    stage<Isa>(result, job.source<T>(0, begin), count, factor(0));
    for (size_t rank = 1; rank < ranks; ++rank) {
      stage<Isa>(term, job.source<T>(rank, begin), count, factor(rank));
      if (rank + 1 < ranks) {
        combine<Isa>(result, result, term, count, op);
      } else {
        combine<Isa>(result, result, term, count, last);
      }
    }
    round_to<Isa>(out, result, count);
  });
}

// Folds at least two sources by `op`, the last of them by `last`. For bf16 only sums are worth
// loops of their own, which widen and round on the way.
template <typename Isa, typename T, typename Op, typename Last>
void fold(const Job& job, Op op, Last last) {
  constexpr bool kStaged =
      std::is_same_v<T, Half> || (std::is_same_v<T, BFloat16> && !std::is_same_v<Op, Sum>);
  if constexpr (kStaged) {
    fold_staged<Isa, T>(job, op, last);
  } else {
    const size_t ranks = job.sources.size();
    for_blocks<Isa, T>(job, [&](T* out, int64_t begin, int64_t count) {
      const auto source = [&](size_t rank) { return job.source<T>(rank, begin); };
      if (ranks == 2) return combine<Isa>(out, source(0), source(1), count, last);
      Computed<T> result[kBlock<T>];
      combine<Isa>(result, source(0), source(1), count, op);
      for (size_t rank = 2; rank + 1 < ranks; ++rank) {
        combine<Isa>(result, result, source(rank), count, op);
      }
      combine<Isa>(out, result, source(ranks - 1), count, last);
    });
  }
}

template <typename Isa, typename T, typename Op>
void fold(const Job& job, Op op) {
  fold<Isa, T>(job, op, op);
}

template <typename Isa, typename T>
void fold_average(const Job& job) {
  using C = Computed<T>;
  const auto terms = static_cast<C>(job.terms);
  // Multiplying gives the bits of a division in less time where the divisor is a power of two.
  if (std::has_single_bit(job.terms)) {
    fold<Isa, T>(job, Sum{}, SumScaled<C>{1 / terms});
  } else {
    fold<Isa, T>(job, Sum{}, SumDivided<C>{terms});
  }
}

template <typename Isa, typename Real>
void fold_complex_product(const Job& job) {
  using T = Complex<Real>;
  const size_t ranks = job.sources.size();
  for_blocks<Isa, T>(job, [&](T* out, int64_t begin, int64_t count) {
    const auto source = [&](size_t rank) { return job.source<T>(rank, begin); };
    if (ranks == 2) return multiply<Isa>(out, source(0), source(1), count);
    T result[kBlock<T>];
    multiply<Isa>(result, source(0), source(1), count);
    for (size_t rank = 2; rank + 1 < ranks; ++rank) {
      multiply<Isa>(result, result, source(rank), count);
    }
    multiply<Isa>(out, result, source(ranks - 1), count);
  });
}

template <typename Isa, typename T>
void reduce_reals(const Job& job, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return fold<Isa, T>(job, Sum{});
    case ReduceOp::kAvg:
      return fold_average<Isa, T>(job);
    case ReduceOp::kPremulSum:
      return fold_staged<Isa, T>(job, Sum{}, Sum{});
    case ReduceOp::kProduct:
      return fold<Isa, T>(job, Product{});
    case ReduceOp::kMin:
      return fold<Isa, T>(job, Min{});
    case ReduceOp::kMax:
      return fold<Isa, T>(job, Max{});
    default:
      return;  // refused
  }
}

template <typename Isa, typename Real>
void reduce_complex(const Job& job, ReduceOp op) {
  if (op == ReduceOp::kProduct) return fold_complex_product<Isa, Real>(job);
  reduce_reals<Isa, Real>(job.in_parts(2), op);
}

// Reduces bytes, or truths.
template <typename Isa, typename T>
void reduce_bits(const Job& job, ReduceOp op) {
  if (op == ReduceOp::kBand) return fold<Isa, T>(job, And{});
  if (op == ReduceOp::kBor) return fold<Isa, T>(job, Or{});
  fold<Isa, T>(job, Xor{});
}

template <typename Isa, typename T>
void reduce_integers(const Job& job, ReduceOp op) {
  using Wrapping = std::make_unsigned_t<T>;
  switch (op) {
    case ReduceOp::kSum:
      return fold<Isa, Wrapping>(job, Sum{});
    case ReduceOp::kAvg: {
      using Last = SumQuotient<T>;
      return fold<Isa, Wrapping>(job, Sum{}, Last{static_cast<typename Last::Wide>(job.terms)});
    }
    case ReduceOp::kProduct:
      return fold<Isa, Wrapping>(job, Product{});
    case ReduceOp::kMin:
      return fold<Isa, T>(job, Min{});
    case ReduceOp::kMax:
      return fold<Isa, T>(job, Max{});
    default:
      return reduce_bits<Isa, uint8_t>(job.in_parts(sizeof(T)), op);
  }
}

template <typename Isa>
void reduce_bools(const Job& job, ReduceOp op) {
  if (job.sources.size() == 1) return fold_staged<Isa, Truth>(job, Or{}, Or{});
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
      return reduce_bits<Isa, Truth>(job, ReduceOp::kBor);
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
      return reduce_bits<Isa, Truth>(job, ReduceOp::kBand);
    default:
      return reduce_bits<Isa, Truth>(job, op);
  }
}

template <typename Isa>
void reduce_job(const Job& job, Dtype dtype, ReduceOp op) {
  const bool as_it_is = job.sources.size() == 1 && op != ReduceOp::kPremulSum;
  if (as_it_is && dtype != Dtype::kBool) return move<Isa>(job.in_parts(element_bytes(dtype)));
  switch (dtype) {
    case Dtype::kBool:
      return reduce_bools<Isa>(job, op);
    case Dtype::kU8:
      return reduce_integers<Isa, uint8_t>(job, op);
    case Dtype::kI8:
      return reduce_integers<Isa, int8_t>(job, op);
    case Dtype::kU16:
      return reduce_integers<Isa, uint16_t>(job, op);
    case Dtype::kI16:
      return reduce_integers<Isa, int16_t>(job, op);
    case Dtype::kU32:
      return reduce_integers<Isa, uint32_t>(job, op);
    case Dtype::kI32:
      return reduce_integers<Isa, int32_t>(job, op);
    case Dtype::kU64:
      return reduce_integers<Isa, uint64_t>(job, op);
    case Dtype::kI64:
      return reduce_integers<Isa, int64_t>(job, op);
    case Dtype::kF16:
      return reduce_reals<Isa, Half>(job, op);
    case Dtype::kBF16:
      return reduce_reals<Isa, BFloat16>(job, op);
    case Dtype::kF32:
      return reduce_reals<Isa, float>(job, op);
    case Dtype::kF64:
      return reduce_reals<Isa, double>(job, op);
    case Dtype::kComplexF32:
      return reduce_complex<Isa, float>(job, op);
    case Dtype::kComplexF64:
      return reduce_complex<Isa, double>(job, op);
    case Dtype::kF8E4M3:
    case Dtype::kF8E5M2:
    case Dtype::kF8E4M3Nuz:
    case Dtype::kF8E5M2Nuz:
    case Dtype::kF8E8M0:
    case Dtype::kBytes:
      return;  // refused
  }
}

template <typename Isa>
void reduce_by(void* dst, void* second, const ReduceRequest& request, bool stream_second) {
  const bool premultiplied = request.op == ReduceOp::kPremulSum;
  const Job job{dst,
                second,
                stream_second,
                request.numel,
                request.sources,
                premultiplied ? request.factors : nullptr,
                request.terms > 0 ? static_cast<uint64_t>(request.terms) : request.sources.size()};
  reduce_job<Isa>(job, request.dtype, request.op);
  if (second != nullptr && stream_second) cpu::stream_fence();
}

template <typename Isa>
ReduceLoops reduce_loops_of(Isa /*isa*/) {
  return {Isa::kName, &reduce_by<Isa>, &copy_streaming_by<Isa>};
}

}  // namespace

std::span<const ReduceLoops> supported_reduce_loops() {
  static const auto loops =
      cpu::supported_loops<cpu::Isas>([](auto isa) { return reduce_loops_of(isa); });
  return loops;
}

}  // namespace trireme::shm
