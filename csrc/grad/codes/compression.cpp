#include <trireme/grad/codes/compression.h>

#include <trireme/common/error.h>

#include <type_traits>
#include <vector>

namespace trireme {
namespace {

constexpr auto kFloatBytes = static_cast<int64_t>(sizeof(float));

template <typename Method>
constexpr bool kIsCast = std::is_same_v<Method, Fp16> || std::is_same_v<Method, Bf16>;

const char* name_of(const Fp16& /*method*/) { return "Fp16"; }
const char* name_of(const Bf16& /*method*/) { return "Bf16"; }
const char* name_of(const Int8& /*method*/) { return "Int8"; }
const char* name_of(const Int4& /*method*/) { return "Int4"; }
const char* name_of(const Sign& /*method*/) { return "Sign"; }

BlockKind kind_of(const Int8& /*method*/) { return BlockKind::kInt8; }
BlockKind kind_of(const Int4& /*method*/) { return BlockKind::kInt4; }
BlockKind kind_of(const Sign& /*method*/) { return BlockKind::kSign; }

std::string text_of(bool value) { return value ? "True" : "False"; }

void check_at_least(int64_t least, const char* argument, int64_t value) {
  TORCH_CHECK_VALUE(value >= least,
                    error_text("compression",
                               std::string("got ") + argument + "=" + std::to_string(value) +
                                   ", expected at least " + std::to_string(least),
                               {}, "Leave it out for the default."));
}

// Returns the bytes of a code, whether or not it would be used.
int64_t coded_bytes(const Compression& compression, int64_t numel) {
  const auto format = block_format(compression);
  return format ? code_bytes(*format, numel) : 2 * numel;
}

}  // namespace

void check(const Compression& compression) {
  std::visit(
      [](const auto& method) {
        check_at_least(0, "dense_below", method.dense_below);
        if constexpr (!kIsCast<std::decay_t<decltype(method)>>)
          check_at_least(1, "block", method.block);
      },
      compression);
}

std::string to_string(const Compression& compression) {
  return std::visit(
      [](const auto& method) {
        using Method = std::decay_t<decltype(method)>;
        std::string text = std::string(name_of(method)) + "(";
        if constexpr (!kIsCast<Method>) text += "block=" + std::to_string(method.block) + ", ";
        if constexpr (std::is_same_v<Method, Int8>) {
          const bool nearest = method.rounding == Rounding::kNearest;
          text += std::string("rounding='") + (nearest ? "nearest" : "stochastic") + "', ";
        }
        return text + "error_feedback=" + text_of(method.error_feedback) +
               ", dense_below=" + std::to_string(method.dense_below) + ", between='" +
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
  return std::visit(
      [](const auto& method) -> std::optional<BlockFormat> {
        if constexpr (kIsCast<std::decay_t<decltype(method)>>) {
          return std::nullopt;
        } else {
          return BlockFormat{kind_of(method), method.block};
        }
      },
      compression);
}

std::optional<at::ScalarType> cast_dtype(const Compression& compression) {
  if (std::holds_alternative<Fp16>(compression)) return at::kHalf;
  if (std::holds_alternative<Bf16>(compression)) return at::kBFloat16;
  return std::nullopt;
}

bool is_dense(const Compression& compression, int64_t numel) {
  const int64_t below =
      std::visit([](const auto& method) { return method.dense_below; }, compression);
  return numel < below || coded_bytes(compression, numel) >= numel * kFloatBytes;
}

int64_t code_bytes(const Compression& compression, int64_t numel) {
  return is_dense(compression, numel) ? numel * kFloatBytes : coded_bytes(compression, numel);
}

}  // namespace trireme
