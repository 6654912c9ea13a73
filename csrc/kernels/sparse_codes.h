#pragma once

#include <trireme/common/export.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace trireme {

// Returns how many of `numel` values are sent at that density, in (0, 1].
TRIREME_API int64_t sent_of(double density, int64_t numel);

// A code of runs of fp32 values: the largest of a run, or of each chunk of it, with their places.
//
//   [ values: fp32 ][ places: 32 bits each, or log2(chunk) bits in chunks ]
//
// Each run and chunk of n values sends ceil(density * n). Ties go to the lower place.
//
// In chunks values may have 2 bits in place of 32, a sign and which of two sizes:
//
//   [ sizes: two fp16 per chunk ][ numbers: place * 4 + is_large * 2 + is_negative ]
//
// The sizes are the means of the sent sizes that are at least, and that are below, the mean of all
// of them in the chunk.
struct SparseFormat {
  double density = 0.01;
  int64_t chunk = 0;  // a power of two; 0: no chunks
  int64_t bits = 32;  // of a value; 2 in chunks only

  int64_t count(int64_t numel) const;  // values that are sent of a run
  TRIREME_API int64_t bytes(int64_t numel) const;
};

// Values to be coded.
struct SparseValues {
  const float* values;
  // What earlier codes left out, one per value, or null: `decay` of it is added to the values, and
  // it then holds what this code leaves out. It stays as it is, and the code says NaN, in a run or
  // chunk that holds NaN or Inf.
  float* residual = nullptr;
  int64_t numel = 0;
  float decay = 1;
  // Sends values of at least this size, as many as there is room for, in place of the largest; it
  // is corrected by a sample of the values, and found by one if it is 0. Null: exactly the largest.
  float* threshold = nullptr;
  uint32_t draw = 0;  // where the sample begins
};

// Writes format.bytes(numel) to `code`, aligned to 4 bytes. By the calling thread.
TRIREME_API void encode(const SparseFormat& format, const SparseValues& from, std::byte* code);

// Sets to[i] to `factor` times the sum of what the codes of several ranks say of it, added up in
// their order. Throws ValueError for a place that is not in the run.
TRIREME_API void decode(const SparseFormat& format, std::span<const std::byte* const> codes,
                        float* to, int64_t numel, float factor);

namespace cpu {

// values + decay * residual; the residual may be null.
struct SparseSums {
  const float* values;
  float* residual;
  int64_t numel;
  float decay;
};

// Where the sums that are sent go, with their places; `room` of each.
struct SparsePicks {
  float* values;
  uint32_t* places;
  int64_t room;
};

// The loops over a run of one instruction set. All sets give the same bits, save those of a NaN.
struct SparseLoops {
  std::string_view isa;
  // Returns the bits of the largest size: 0x7f800000 and above if not all sums are finite.
  int32_t (*largest)(const SparseSums& from);
  // Takes the first sums other than 0 that are at least as large as `threshold`, and leaves the
  // rest in the residual. Returns how many it took.
  int64_t (*take_large)(const SparseSums& from, float threshold, const SparsePicks& to);
};

// Returns the loops that this processor can run, the fastest last; exported for the tests, which
// run each of them.
TRIREME_API std::span<const SparseLoops> supported_sparse_loops();

}  // namespace cpu
}  // namespace trireme
