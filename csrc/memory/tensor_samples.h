#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace trireme {

// [Note: samples]
//
// Autograd counts writes in place, but not those through `.data`, through a raw pointer or by
// another process. Code that must notice these looks at values: a few elements of each tensor are
// kept, and compared with the values there later. A write that changes a sampled element is found
// with certainty, hence also one that changes all elements. A write to some elements is found if it
// hits a sample. Samples lie elsewhere after each read(), so that a write that is repeated in every
// step is found sooner or later.
//
// Bytes are compared, so that NaN equals itself.

// Returns which of `numel` elements are sampled, ascending: the first, the last, and one at random
// of each of equal stretches between them: 4 per tensor and 8 per MiB, or all if there are no more.
// Equal arguments give equal results.
TRIREME_API std::vector<int64_t> sample_positions(int64_t numel, int64_t item_bytes, uint64_t seed);

// The factors, in [least, most], by which values may have been multiplied, as far as their rounding
// tells.
struct TRIREME_API FactorRange {
  double least = -std::numeric_limits<double>::infinity();
  double most = std::numeric_limits<double>::infinity();

  bool is_empty() const { return least > most; }
  // Returns the intersection of both.
  FactorRange operator&(const FactorRange& other) const;
  bool operator==(const FactorRange&) const = default;
};

// Finds the one factor by which many values were multiplied, if there is one.
class TRIREME_API CommonFactor {
 public:
  // One value, rounded to relative precision `roundoff`. Zeros, non-finite values and numbers below
  // `smallest`, where rounding is coarser, are ignored.
  struct Pair {
    double before;
    double now;
    double roundoff;
    double smallest;
  };
  void add(const Pair& pair);
  // Returns all numbers, if there is none, or if fewer than three magnitudes were seen: a few
  // elements that were changed one by one look as if they had a common factor.
  FactorRange range() const;

 private:
  static constexpr size_t kFewest = 3;
  FactorRange range_;
  std::array<double, kFewest> magnitudes_{};
  size_t seen_ = 0;
};

// Elements that lie side by side in CPU memory, in memory order.
struct SampledMemory {
  const std::byte* data = nullptr;  // null: there is nothing to sample
  int64_t numel = 0;
  at::ScalarType dtype = at::kFloat;

  // Returns all elements of a tensor; nothing if it is undefined, not in CPU memory, not strided,
  // or has gaps.
  TRIREME_API static SampledMemory of(const at::Tensor& tensor);
  // Returns elements [begin, begin + numel) of these; nothing if there are fewer.
  TRIREME_API SampledMemory part(int64_t begin, int64_t numel) const;
};

// Samples of some tensors, which have numbers. Any dtype. One thread at a time.
//
// Costs a cache miss per sample: 0.05 to 0.1 us. Keeps 24 bytes of each.
class TRIREME_API TensorSamples {
 public:
  // `seed` selects which elements are sampled.
  explicit TensorSamples(uint64_t seed = 0) : seed_(seed) {}

  // Replaces the samples of this tensor, also if there is nothing to sample.
  void read(size_t tensor, const SampledMemory& memory);
  void clear();

  // Returns whether a sample has changed its value. False for a tensor that was not read, or has
  // another dtype or number of elements now.
  bool is_changed(size_t tensor, const SampledMemory& now) const;
  // Adds the old and new values of a tensor's samples to `factor`, if they are of a dtype that
  // gradients have.
  void compare(size_t tensor, const SampledMemory& now, CommonFactor& factor) const;

 private:
  struct Sample {
    int64_t position;
    std::array<std::byte, 16> value;
  };
  struct Sampled {
    int64_t numel = -1;  // -1: nothing
    at::ScalarType dtype = at::kFloat;
    std::vector<Sample> samples;
  };
  const Sampled* same(size_t tensor, const SampledMemory& now) const;

  std::vector<Sampled> sampled_;
  uint64_t seed_;
  uint64_t reads_ = 0;
};

}  // namespace trireme
