#pragma once

#include <trireme/common/export.h>
#include <trireme/kernels/block_codes.h>
#include <trireme/kernels/sparse_codes.h>

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>
#include <string>
#include <variant>

namespace trireme {

// [Note: gradient compression]
//
// A *sender* is who sends gradients over a link: a rank, or all ranks of a host together. What it
// sends of a parameter is a *code* of fewer bytes than the gradient. What a code leaves out is kept
// as the *residual* of that sender and parameter, and added to what the sender codes in the next
// step (error feedback; Seide et al. 2014, Karimireddy et al. 2019):
//
//   p = gradient + residual      sent: code(p)      residual' = p - decoded(code(p))
//
// .grad becomes the mean over the senders of what was decoded. Codes are made per parameter, of its
// elements as they lie in memory, in fp32: results depend on neither buckets nor their order.
// Parameters of fewer than `dense_below` elements, and those that a code would not shrink, go as
// fp32.

// Between whom gradients are compressed.
enum class Between : uint8_t {
  kHosts,  // ranks that share the memory of a host send together; others each for themselves
  kRanks,  // each rank sends for itself
};

enum class Rounding : uint8_t {
  kNearest,     // ties to even
  kStochastic,  // up or down by chance, right on average; drawn from step, parameter and sender
};

// Gradients rounded to 16 bits and all-reduced: 2 bytes per element
// (torch.distributed.algorithms.ddp_comm_hooks.default_hooks).
struct Fp16 {
  bool error_feedback = false;
  int64_t dense_below = 1024;
  Between between = Between::kHosts;

  bool operator==(const Fp16&) const = default;
};
struct Bf16 {
  bool error_feedback = false;
  int64_t dense_below = 1024;
  Between between = Between::kHosts;

  bool operator==(const Bf16&) const = default;
};

// 8 bits per element and one scale per block: 1 + 4 / block bytes.
struct Int8 {
  int64_t block = 256;
  Rounding rounding = Rounding::kNearest;
  bool error_feedback = true;
  int64_t dense_below = 1024;
  Between between = Between::kHosts;

  bool operator==(const Int8&) const = default;
};

// 4 bits per element and one scale per block: 1/2 + 4 / block bytes.
struct Int4 {
  int64_t block = 64;
  bool error_feedback = true;
  int64_t dense_below = 1024;
  Between between = Between::kHosts;

  bool operator==(const Int4&) const = default;
};

// The sign of each element, and the mean size of a block (signSGD with error feedback; Karimireddy
// et al. 2019): 1/8 + 4 / block bytes per element.
struct Sign {
  int64_t block = 256;
  bool error_feedback = true;
  int64_t dense_below = 1024;
  Between between = Between::kHosts;

  bool operator==(const Sign&) const = default;
};

// The largest elements of each parameter, or of each chunk of it, whole: 8 * density bytes per
// element, of which an index in chunks takes log2(chunk) bits (Lin et al. 2018; Aji and Heafield
// 2017). What is not sent stays in the residual, which counts `decay` of itself in each step.
//
// Without `exact`, parameters of 65536 elements and more send those above a threshold, which is
// kept from step to step and corrected by a sample: at most as many, and on average 4 of 5 or more.
// Chunks are exact. Parameters of 2^32 elements and more go as fp32, unless in chunks.
struct TopK {
  double density = 0.01;              // in (0, 1]: ceil(density * n) of n elements are sent
  std::optional<int64_t> chunk = {};  // a power of two; all of the parameter if absent
  int64_t bits = 32;                  // of a value; 2 in chunks: sparse_codes.h
  bool exact = false;
  double decay = 1;
  bool error_feedback = true;
  int64_t dense_below = 1024;
  Between between = Between::kHosts;

  bool operator==(const TopK&) const = default;
};

// Elements at positions that all senders draw alike from seed, step and name, one in each of as
// many equal parts of a parameter; all-reduced: 4 * density bytes per element. Without error
// feedback they are multiplied by 1 / density, so that the mean is right on average.
struct RandomK {
  double density = 0.01;
  int64_t seed = 0;
  bool error_feedback = true;
  int64_t dense_below = 1024;
  Between between = Between::kHosts;

  bool operator==(const RandomK&) const = default;
};

// The approximation of each parameter, as a matrix M of its first dimension by the rest, by two
// matrices of rank r (Vogels et al. 2019; torch's powerSGD_hook): P = MQ is all-reduced and made
// orthogonal, Q = M'P is all-reduced and kept for the next step; PQ' is the mean. 4 r (m + n)
// bytes. Parameters go as fp32 before `start_step`, and if m n / (r (m + n)) is below `min_ratio`.
struct PowerSGD {
  int64_t rank = 4;
  int64_t start_step = 10;
  double min_ratio = 2;
  int64_t seed = 0;  // of the first Q
  bool error_feedback = true;
  int64_t dense_below = 1024;
  Between between = Between::kHosts;

  bool operator==(const PowerSGD&) const = default;
};

using Compression = std::variant<Fp16, Bf16, Int8, Int4, Sign, TopK, RandomK, PowerSGD>;

// Throws ValueError, naming the argument, for one that its method cannot have.
TRIREME_API void check(const Compression& compression);

// Returns "Int4".
TRIREME_API const char* name_of(const Compression& compression);
// Returns the method and its arguments as Python writes them: "Int4(block=64, error_feedback=True,
// dense_below=1024, between='hosts')".
TRIREME_API std::string to_string(const Compression& compression);

TRIREME_API Between between(const Compression& compression);
TRIREME_API bool has_error_feedback(const Compression& compression);

// Returns the format of codes in blocks; absent for methods without.
TRIREME_API std::optional<BlockFormat> block_format(const Compression& compression);
SparseFormat sparse_format(const TopK& method);
// Returns the dtype to which a cast rounds; absent for the others.
TRIREME_API std::optional<at::ScalarType> cast_dtype(const Compression& compression);

// Returns whether a method sends what is above a threshold of this many elements, which it keeps
// from step to step.
TRIREME_API bool has_threshold(const Compression& compression, int64_t numel);

// A parameter as a matrix: its first dimension by the rest.
struct MatrixShape {
  int64_t rows = 1;
  int64_t columns = 1;

  int64_t numel() const { return rows * columns; }
};
TRIREME_API MatrixShape matrix_shape(at::IntArrayRef sizes);

// Returns whether a parameter goes as fp32, whatever the step, and the bytes that one sender sends
// for it in one journey.
TRIREME_API bool is_dense(const Compression& compression, const MatrixShape& shape);
TRIREME_API int64_t code_bytes(const Compression& compression, const MatrixShape& shape);

// Returns the elements that belong together in a code, so that a parameter may be cut behind any
// multiple of them; absent if it must not be cut.
TRIREME_API std::optional<int64_t> unit_of(const Compression& compression);

}  // namespace trireme
