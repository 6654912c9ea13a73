#pragma once

#include <trireme/common/export.h>
#include <trireme/shm/dtype.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

// Element-wise reductions of memory that this process sees, and copies of it. Everything here runs
// on the calling thread, may be called by many at once, and allocates nothing. Pointers need the
// alignment of one element (of one of its two reals, if complex), no more.
namespace trireme::shm {

enum class ReduceOp : uint8_t { kSum, kAvg, kPremulSum, kProduct, kMin, kMax, kBand, kBor, kBxor };

// Returns an operation's name in torch: "SUM"; "unknown" for a number that is no ReduceOp.
TRIREME_API std::string_view name(ReduceOp op);

// Returns why `op` cannot reduce `dtype`, as the end of a sentence; nothing if it can.
TRIREME_API std::optional<std::string_view> refusal(ReduceOp op, Dtype dtype);

struct ReduceRequest {
  Dtype dtype;
  ReduceOp op;
  int64_t numel;
  std::span<const void* const> sources;  // in rank order, at least one
  const double* factors = nullptr;       // kPremulSum only: one per source
  // For kAvg only: how many terms the sources hold in all, if they (at least two) are sums
  // themselves. 0: as many as there are sources.
  int64_t terms = 0;
};

// Sets dst[i] = sources[0][i] op sources[1][i] op ..., from left to right. `dst` may be one of the
// sources, if that is listed once. `second`, unless it is null, receives the same bytes (with
// `stream_second` past the caches, and seen by a thread that acquires what this one releases next).
// Nothing else may overlap.
//
// The bits of a result depend on those of the sources and on their order only, not on the
// processor, on alignment or on where a call's range begins; which NaN a NaN is stays open, and
// threads must agree on the floating-point mode (rounding, flushing of subnormals).
//   fp16, bf16    computed in fp32, rounded once at the end, to nearest even
//   kAvg          the sum divided by the number of terms: a true division, as torch's `/ world`
//   kPremulSum    the sum of factors[r] * sources[r]; each product is rounded before it is added,
//                 the factor before it is used (to fp64 for fp64, else to fp32)
//   kMin, kMax    a NaN in any source is the result; of zeros the first counts, whatever its sign
//   integers      wrap around; kAvg divides their sum towards zero, as NCCL does
//   bool          any byte but 0 is true, only 0 and 1 are written. kSum, kMax and kBor are "or",
//                 kProduct, kMin and kBand "and"
//
// Cost: one pass over the sources and `dst`, through the nearest cache; `dst` is written once.
// Throws std::invalid_argument for what `refusal` names and for a request without sources, factors
// or with a negative count, and for `terms` of a single source.
TRIREME_API void reduce(void* dst, void* second, const ReduceRequest& request, bool stream_second);

// Copy bytes from `src` to `dst`, which do not overlap; the second writes past the caches, whole
// lines at a time, for data that this processor will not read again soon. Its bytes, too, are seen
// by a thread that acquires what this one releases next.
TRIREME_API void copy(void* dst, const void* src, int64_t bytes);
TRIREME_API void copy_streaming(void* dst, const void* src, int64_t bytes);

}  // namespace trireme::shm
