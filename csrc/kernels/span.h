#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

namespace trireme {

// Adjacent real numbers in memory, not owned: fp32, fp64, fp16 or bf16.
struct ConstSpan {
  const void* data;
  at::ScalarType dtype;
  int64_t numel;
};

struct Span {
  void* data;
  at::ScalarType dtype;
  int64_t numel;

  operator ConstSpan() const { return {data, dtype, numel}; }
};

// Returns elements [begin, end) of a span.
inline Span slice(Span span, int64_t begin, int64_t end) {
  const auto bytes = static_cast<int64_t>(c10::elementSize(span.dtype));
  return {static_cast<char*>(span.data) + begin * bytes, span.dtype, end - begin};
}
inline ConstSpan slice(ConstSpan span, int64_t begin, int64_t end) {
  const auto bytes = static_cast<int64_t>(c10::elementSize(span.dtype));
  return {static_cast<const char*>(span.data) + begin * bytes, span.dtype, end - begin};
}

// Returns the memory of a tensor that is non-overlapping and dense, in its own memory order. A
// complex number counts as two reals. It is valid as long as the tensor's storage is; writing
// through it does not move the version counter.
TRIREME_API Span span_of(const at::Tensor& tensor);

// The two calls below take CPU memory, skip the dispatcher and allocate nothing: a gradient of 64
// elements costs some twenty nanoseconds. Products are made in fp32, in fp64 if either side is
// fp64, and rounded to nearest even; from fp64 to fp16 or bf16 the value passes through fp32, as in
// torch's own casts. More than 32768 elements are shared among the threads of torch's intra-op
// pool. Both throw c10::Error if a dtype is none of the four or if the lengths differ.

// Sets dst = cast(scale * src). With one dtype and scale 1 it copies the bytes. `dst` and `src` may
// be the same memory if they have the same dtype; otherwise they must not overlap.
TRIREME_API void scaled_copy(Span dst, ConstSpan src, double scale);

// Sets dst += cast(scale * src): the product is rounded to dst's dtype, then the sum is. No
// overlap.
TRIREME_API void scaled_add(Span dst, ConstSpan src, double scale);

}  // namespace trireme
