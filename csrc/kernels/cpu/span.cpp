#include <trireme/kernels/span.h>

#include <trireme/common/error.h>
#include <trireme/kernels/cpu/convert.h>
#include <trireme/kernels/cpu/parallel.h>
#include <trireme/kernels/cpu/runs.h>

#include <algorithm>
#include <cstring>
#include <string>

namespace trireme {
namespace cpu {
namespace {

// The products that are on their way into a sum: at most 4 KiB, so they do not leave the nearest
// cache.
constexpr int64_t kProductBlock = 512;

[[noreturn]] void refuse_dtype(at::ScalarType dtype) {
  TORCH_CHECK_TYPE(false, error_text("span",
                                     std::string("got dtype ") + c10::toString(dtype) +
                                         ", expected Float, Double, Half or BFloat16",
                                     {}, "Convert the tensor first."));
}

size_t index_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return static_cast<size_t>(Real::kFloat);
    case at::kDouble:
      return static_cast<size_t>(Real::kDouble);
    case at::kHalf:
      return static_cast<size_t>(Real::kHalf);
    case at::kBFloat16:
      return static_cast<size_t>(Real::kBFloat16);
    default:
      refuse_dtype(dtype);
  }
}

const ConvertLoops& best_loops() {
  static const ConvertLoops& best = supported_convert_loops().back();
  return best;
}

}  // namespace

void copy_run(Span dst, ConstSpan src, double scale) {
  const size_t to = index_of(dst.dtype);
  const size_t from = index_of(src.dtype);
  if (to != from || scale != 1.0) {
    best_loops().convert[to][from](dst.data, src.data, dst.numel, scale);
  } else if (dst.data != src.data && dst.numel > 0) {
    std::memcpy(dst.data, src.data, static_cast<size_t>(dst.numel) * c10::elementSize(dst.dtype));
  }
}

void add_run(Span dst, ConstSpan src, double scale) {
  const size_t to = index_of(dst.dtype);
  const AddLoop add = best_loops().add[to];
  if (to == index_of(src.dtype) && scale == 1.0) return add(dst.data, src.data, dst.numel);

  const ConvertLoop convert = best_loops().convert[to][index_of(src.dtype)];
  alignas(64) char products[kProductBlock * sizeof(double)];
  for (int64_t begin = 0; begin < dst.numel; begin += kProductBlock) {
    const int64_t count = std::min(kProductBlock, dst.numel - begin);
    convert(products, slice(src, begin, begin + count).data, count, scale);
    add(slice(dst, begin, begin + count).data, products, count);
  }
}

}  // namespace cpu

namespace {

void check_pair(const char* area, Span dst, ConstSpan src) {
  TORCH_CHECK_VALUE(dst.numel == src.numel,
                    error_text(area,
                               "got " + std::to_string(src.numel) + " elements, expected " +
                                   std::to_string(dst.numel),
                               {}, "Cut both spans to the same length."));
}

}  // namespace

Span span_of(const at::Tensor& tensor) {
  const int64_t reals = tensor.is_complex() ? 2 : 1;
  return {tensor.data_ptr(), c10::toRealValueType(tensor.scalar_type()), reals * tensor.numel()};
}

void scaled_copy(Span dst, ConstSpan src, double scale) {
  check_pair("scaled_copy", dst, src);
  if (dst.numel <= cpu::kGrain) return cpu::copy_run(dst, src, scale);
  cpu::for_ranges(dst.numel, [&](int64_t begin, int64_t end) {
    cpu::copy_run(slice(dst, begin, end), slice(src, begin, end), scale);
  });
}

void scaled_add(Span dst, ConstSpan src, double scale) {
  check_pair("scaled_add", dst, src);
  if (dst.numel <= cpu::kGrain) return cpu::add_run(dst, src, scale);
  cpu::for_ranges(dst.numel, [&](int64_t begin, int64_t end) {
    cpu::add_run(slice(dst, begin, end), slice(src, begin, end), scale);
  });
}

}  // namespace trireme
