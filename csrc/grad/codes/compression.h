#pragma once

#include <trireme/common/export.h>
#include <trireme/kernels/block_codes.h>

#include <c10/core/ScalarType.h>

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

using Compression = std::variant<Fp16, Bf16, Int8, Int4, Sign>;

// Throws ValueError, naming the argument, unless block is at least 1 and dense_below at least 0.
TRIREME_API void check(const Compression& compression);

// Returns the method and its arguments as Python writes them: "Int4(block=64, error_feedback=True,
// dense_below=1024, between='hosts')".
TRIREME_API std::string to_string(const Compression& compression);

TRIREME_API Between between(const Compression& compression);
TRIREME_API bool has_error_feedback(const Compression& compression);

// Returns the format of codes in blocks; absent for the casts.
TRIREME_API std::optional<BlockFormat> block_format(const Compression& compression);
// Returns the dtype to which a cast rounds; absent for the others.
TRIREME_API std::optional<at::ScalarType> cast_dtype(const Compression& compression);

// Returns whether a parameter of `numel` elements goes as fp32, and the bytes that one sender sends
// for it in one journey.
TRIREME_API bool is_dense(const Compression& compression, int64_t numel);
TRIREME_API int64_t code_bytes(const Compression& compression, int64_t numel);

}  // namespace trireme
