#include <trireme/shm/reduce.h>

#include <trireme/common/error.h>
#include <trireme/shm/reduce_loops.h>

#include <cstring>
#include <stdexcept>
#include <string>

namespace trireme::shm {
namespace {

bool is_complex(Dtype dtype) { return dtype == Dtype::kComplexF32 || dtype == Dtype::kComplexF64; }

bool is_real(Dtype dtype) {
  return dtype == Dtype::kF16 || dtype == Dtype::kBF16 || dtype == Dtype::kF32 ||
         dtype == Dtype::kF64;
}

[[noreturn]] void refuse(const std::string& what, std::string_view next_step) {
  throw std::invalid_argument(error_text("reduce", what, {}, next_step));
}

void check(const ReduceRequest& request) {
  if (const auto reason = refusal(request.op, request.dtype)) {
    refuse("got " + std::string(name(request.op)) + " of " + std::string(name(request.dtype)) +
               ", but " + std::string(*reason),
           "Choose another operation, or convert first.");
  }
  if (request.sources.empty() || request.numel < 0) {
    refuse("got " + std::to_string(request.sources.size()) + " sources of " +
               std::to_string(request.numel) + " elements, expected at least one source",
           "Pass one source per rank.");
  }
  if (request.terms != 0 && request.sources.size() < 2) {
    refuse("got terms of a single source, expected at least two sources", "Divide it by itself.");
  }
  if (request.op == ReduceOp::kPremulSum && request.factors == nullptr) {
    refuse("got PREMUL_SUM without factors, expected one per source", "Pass factors, or use SUM.");
  }
}

const ReduceLoops& best_loops() {
  static const ReduceLoops& best = supported_reduce_loops().back();
  return best;
}

}  // namespace

std::string_view name(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "SUM";
    case ReduceOp::kAvg:
      return "AVG";
    case ReduceOp::kPremulSum:
      return "PREMUL_SUM";
    case ReduceOp::kProduct:
      return "PRODUCT";
    case ReduceOp::kMin:
      return "MIN";
    case ReduceOp::kMax:
      return "MAX";
    case ReduceOp::kBand:
      return "BAND";
    case ReduceOp::kBor:
      return "BOR";
    case ReduceOp::kBxor:
      return "BXOR";
  }
  return "unknown";
}

std::optional<std::string_view> refusal(ReduceOp op, Dtype dtype) {
  const bool fractions = is_real(dtype) || is_complex(dtype);
  if (is_bytes(dtype)) return "bytes can be moved, not reduced";
  if (element_bytes(dtype) == 0) return "there is no such dtype";
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kProduct:
      return std::nullopt;
    case ReduceOp::kAvg:
      if (dtype == Dtype::kBool) return "bool cannot hold an average";
      return std::nullopt;
    case ReduceOp::kPremulSum:
      if (!fractions) return "integers and bool cannot hold products with fractions";
      return std::nullopt;
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      if (is_complex(dtype)) return "complex numbers have no order";
      return std::nullopt;
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor:
      if (fractions) return "bits are combined of integers and bool only";
      return std::nullopt;
  }
  return "there is no such operation";
}

void reduce(void* dst, void* second, const ReduceRequest& request, bool stream_second) {
  check(request);
  best_loops().reduce(dst, second, request, stream_second);
}

void copy(void* dst, const void* src, int64_t bytes) {
  if (bytes > 0) std::memcpy(dst, src, static_cast<size_t>(bytes));
}

void copy_streaming(void* dst, const void* src, int64_t bytes) {
  best_loops().copy_streaming(dst, src, bytes);
}

}  // namespace trireme::shm
