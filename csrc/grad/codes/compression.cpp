#include <trireme/grad/codes/compression.h>

#include <trireme/common/error.h>

#include <c10/util/accumulate.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <sstream>
#include <type_traits>

namespace trireme {
namespace {

constexpr auto kFloatBytes = static_cast<int64_t>(sizeof(float));

// Calls visit(name, value) for each argument of a method, in the order of Python's signature.
template <typename Visit>
void arguments_of(const Fp16& /*method*/, const Visit& /*visit*/) {}
template <typename Visit>
void arguments_of(const Bf16& /*method*/, const Visit& /*visit*/) {}
template <typename Visit>
void arguments_of(const Int8& method, const Visit& visit) {
  visit("block", method.block);
  visit("rounding",
        std::string(method.rounding == Rounding::kNearest ? "'nearest'" : "'stochastic'"));
}
template <typename Visit>
void arguments_of(const Int4& method, const Visit& visit) {
  visit("block", method.block);
}
template <typename Visit>
void arguments_of(const Sign& method, const Visit& visit) {
  visit("block", method.block);
}
template <typename Visit>
void arguments_of(const TopK& method, const Visit& visit) {
  visit("density", method.density);
  visit("chunk", method.chunk ? std::to_string(*method.chunk) : std::string("None"));
  visit("bits", method.bits);
  visit("exact", method.exact);
  visit("decay", method.decay);
}
template <typename Visit>
void arguments_of(const RandomK& method, const Visit& visit) {
  visit("density", method.density);
  visit("seed", method.seed);
}
template <typename Visit>
void arguments_of(const PowerSGD& method, const Visit& visit) {
  visit("rank", method.rank);
  visit("start_step", method.start_step);
  visit("min_ratio", method.min_ratio);
  visit("seed", method.seed);
}

constexpr const char* kNames[] = {"Fp16", "Bf16", "Int8",    "Int4",
                                  "Sign", "TopK", "RandomK", "PowerSGD"};

// Writes values as Python does.
std::string text_of(bool value) { return value ? "True" : "False"; }
std::string text_of(int64_t value) { return std::to_string(value); }
std::string text_of(const std::string& value) { return value; }
std::string text_of(double value) {
  std::ostringstream text;
  text.precision(17);
  text << value;
  return text.str();
}

[[noreturn]] void refuse(const char* argument, const std::string& got,
                         const std::string& expected) {
  TORCH_CHECK_VALUE(
      false, error_text("compression",
                        std::string("got ") + argument + "=" + got + ", expected " + expected, {},
                        "See docs/compression.md."));
}

void check_at_least(int64_t least, const char* argument, int64_t value) {
  if (value < least) refuse(argument, text_of(value), "at least " + text_of(least));
}

void check_share(const char* argument, double value) {
  if (!(value > 0 && value <= 1)) refuse(argument, text_of(value), "a number in (0, 1]");
}

void check_own(const Fp16& /*method*/) {}
void check_own(const Bf16& /*method*/) {}
void check_own(const Int8& method) { check_at_least(1, "block", method.block); }
void check_own(const Int4& method) { check_at_least(1, "block", method.block); }
void check_own(const Sign& method) { check_at_least(1, "block", method.block); }
void check_own(const RandomK& method) { check_share("density", method.density); }
void check_own(const TopK& method) {
  check_share("density", method.density);
  check_share("decay", method.decay);
  if (method.chunk && (*method.chunk < 1 || !std::has_single_bit(uint64_t(*method.chunk))))
    refuse("chunk", text_of(*method.chunk), "a power of two");
  if (method.bits != 2 && method.bits != 32) refuse("bits", text_of(method.bits), "2 or 32");
  if (method.bits == 2 && !method.chunk) refuse("bits", "2", "a chunk beside it");
}
void check_own(const PowerSGD& method) {
  check_at_least(1, "rank", method.rank);
  check_at_least(0, "start_step", method.start_step);
  if (!(method.min_ratio >= 0)) refuse("min_ratio", text_of(method.min_ratio), "at least 0");
}

// Returns the bytes of a code, whether or not it would be used.
int64_t bytes_of(const Fp16& /*method*/, const MatrixShape& shape) { return 2 * shape.numel(); }
int64_t bytes_of(const Bf16& /*method*/, const MatrixShape& shape) { return 2 * shape.numel(); }
int64_t bytes_of(const RandomK& method, const MatrixShape& shape) {
  return kFloatBytes * sent_of(method.density, shape.numel());
}
int64_t bytes_of(const PowerSGD& method, const MatrixShape& shape) {
  return kFloatBytes * method.rank * (shape.rows + shape.columns);
}
int64_t bytes_of(const TopK& method, const MatrixShape& shape) {
  return sparse_format(method).bytes(shape.numel());
}
template <typename Method>
int64_t bytes_of(const Method& method, const MatrixShape& shape) {
  return code_bytes(*block_format(method), shape.numel());
}

// Returns whether a method's own rule has a parameter go as fp32.
template <typename Method>
bool is_left_dense(const Method& /*method*/, const MatrixShape& /*shape*/) {
  return false;
}
// A place has 32 bits.
bool is_left_dense(const TopK& method, const MatrixShape& shape) {
  return !method.chunk && shape.numel() > std::numeric_limits<uint32_t>::max();
}
bool is_left_dense(const PowerSGD& method, const MatrixShape& shape) {
  const auto numel = static_cast<double>(shape.numel());
  return numel < method.min_ratio * static_cast<double>(method.rank) *
                     static_cast<double>(shape.rows + shape.columns);
}

}  // namespace

void check(const Compression& compression) {
  std::visit(
      [](const auto& method) {
        check_at_least(0, "dense_below", method.dense_below);
        check_own(method);
      },
      compression);
}

const char* name_of(const Compression& compression) { return kNames[compression.index()]; }

std::string to_string(const Compression& compression) {
  return std::visit(
      [&](const auto& method) {
        std::string text = std::string(name_of(compression)) + "(";
        arguments_of(method, [&](const char* name, const auto& value) {
          text += std::string(name) + "=" + text_of(value) + ", ";
        });
        return text + "error_feedback=" + text_of(method.error_feedback) +
               ", dense_below=" + text_of(method.dense_below) + ", between='" +
               (method.between == Between::kHosts ? "hosts" : "ranks") + "')";
      },
      compression);
}

Between between(const Compression& compression) {
  return std::visit([](const auto& method) { return method.between; }, compression);
}

bool has_error_feedback(const Compression& compression) {
  return std::visit([](const auto& method) { return method.error_feedback; }, compression);
}

std::optional<BlockFormat> block_format(const Compression& compression) {
  if (const auto* method = std::get_if<Int8>(&compression))
    return BlockFormat{BlockKind::kInt8, method->block};
  if (const auto* method = std::get_if<Int4>(&compression))
    return BlockFormat{BlockKind::kInt4, method->block};
  if (const auto* method = std::get_if<Sign>(&compression))
    return BlockFormat{BlockKind::kSign, method->block};
  return std::nullopt;
}

std::optional<at::ScalarType> cast_dtype(const Compression& compression) {
  if (std::holds_alternative<Fp16>(compression)) return at::kHalf;
  if (std::holds_alternative<Bf16>(compression)) return at::kBFloat16;
  return std::nullopt;
}

SparseFormat sparse_format(const TopK& method) {
  return {method.density, method.chunk.value_or(0), method.bits};
}

bool has_threshold(const Compression& compression, int64_t numel) {
  constexpr int64_t kFrom = 65536;  // below, the largest values are found exactly
  const auto* method = std::get_if<TopK>(&compression);
  return method != nullptr && !method->exact && !method->chunk && numel >= kFrom;
}

MatrixShape matrix_shape(at::IntArrayRef sizes) {
  if (sizes.empty()) return {};
  return {sizes.front(), c10::multiply_integers(sizes.slice(1))};
}

bool is_dense(const Compression& compression, const MatrixShape& shape) {
  return std::visit(
      [&](const auto& method) {
        return shape.numel() < method.dense_below || is_left_dense(method, shape) ||
               bytes_of(method, shape) >= shape.numel() * kFloatBytes;
      },
      compression);
}

int64_t code_bytes(const Compression& compression, const MatrixShape& shape) {
  if (is_dense(compression, shape)) return shape.numel() * kFloatBytes;
  return std::visit([&](const auto& method) { return bytes_of(method, shape); }, compression);
}

std::optional<int64_t> unit_of(const Compression& compression) {
  if (const auto format = block_format(compression)) return format->block;
  if (cast_dtype(compression)) return 1;
  if (const auto* method = std::get_if<TopK>(&compression)) return method->chunk;
  return std::nullopt;
}

}  // namespace trireme
