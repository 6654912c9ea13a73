#include <trireme/shm/packed_tensors.h>

#include <utility>

namespace trireme::shm {
namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kDefined = 1, kRequiresGrad = 2, kOnDevice = 4, kAllFlags = 7;
constexpr int kDtypeShift = 8, kElementShift = 16, kDimsShift = 32;

// The number of elements, and how far the last one lies behind the first; nothing if invalid.
struct Extent {
  int64_t numel = 1;
  int64_t last = 0;
};
std::optional<Extent> extent_of(const PackedTensor& tensor) {
  Extent extent;
  for (const int64_t size : tensor.sizes) {
    if (size < 0 || __builtin_mul_overflow(extent.numel, size, &extent.numel)) return std::nullopt;
  }
  if (extent.numel == 0) return extent;
  for (size_t i = 0; i < tensor.sizes.size(); ++i) {
    int64_t step = 0;
    if (tensor.strides[i] < 0 ||
        __builtin_mul_overflow(tensor.sizes[i] - 1, tensor.strides[i], &step) ||
        __builtin_add_overflow(extent.last, step, &extent.last))
      return std::nullopt;
  }
  return extent;
}

bool lies_within(const PackedTensor& tensor, int64_t payload_bytes) {
  const auto extent = extent_of(tensor);
  if (!extent || tensor.element_bytes == 0) return false;
  if (extent->numel == 0) return true;
  int64_t bytes = 0;
  return extent->last == extent->numel - 1 &&
         !__builtin_mul_overflow(extent->numel, int64_t{tensor.element_bytes}, &bytes) &&
         tensor.offset >= 0 && tensor.offset % kAlignment == 0 && tensor.offset <= payload_bytes &&
         bytes <= payload_bytes - tensor.offset;
}

}  // namespace

void TensorPacker::clear() {
  words_.clear();
  payload_bytes_ = device_bytes_ = 0;
}

int64_t TensorPacker::add(const PackedTensor& tensor) {
  const auto dims = static_cast<int64_t>(tensor.sizes.size());
  int64_t& payload = tensor.is_on_device ? device_bytes_ : payload_bytes_;
  const int64_t offset = (payload + kAlignment - 1) / kAlignment * kAlignment;
  words_.push_back((tensor.is_defined ? kDefined : 0) | (tensor.requires_grad ? kRequiresGrad : 0) |
                   (tensor.is_on_device ? kOnDevice : 0) | int64_t{tensor.dtype} << kDtypeShift |
                   int64_t{tensor.element_bytes} << kElementShift | dims << kDimsShift);
  if (!tensor.is_defined) return offset;
  words_.push_back(offset);
  words_.insert(words_.end(), tensor.sizes.begin(), tensor.sizes.end());
  words_.insert(words_.end(), tensor.strides.begin(), tensor.strides.end());
  int64_t bytes = tensor.element_bytes;
  for (const int64_t size : tensor.sizes) bytes *= size;
  if (bytes > 0) payload = offset + bytes;
  return offset;
}

std::optional<std::vector<PackedTensor>> unpack(std::span<const int64_t> description,
                                                int64_t payload_bytes, int64_t device_bytes) {
  std::vector<PackedTensor> tensors;
  while (!description.empty()) {
    const auto word = static_cast<uint64_t>(description.front());
    description = description.subspan(1);
    PackedTensor tensor;
    tensor.is_defined = (word & kDefined) != 0;
    tensor.requires_grad = (word & kRequiresGrad) != 0;
    tensor.is_on_device = (word & kOnDevice) != 0;
    tensor.dtype = static_cast<uint8_t>(word >> kDtypeShift);
    tensor.element_bytes = static_cast<uint8_t>(word >> kElementShift);
    const uint64_t dims = word >> kDimsShift;
    if ((word & 0xff & ~uint64_t{kAllFlags}) != 0) return std::nullopt;
    if (tensor.is_defined) {
      if (description.empty() || dims > (description.size() - 1) / 2) return std::nullopt;
      tensor.offset = description.front();
      const auto sizes = description.subspan(1, dims);
      const auto strides = description.subspan(1 + dims, dims);
      tensor.sizes.assign(sizes.begin(), sizes.end());
      tensor.strides.assign(strides.begin(), strides.end());
      description = description.subspan(1 + 2 * dims);
      if (!lies_within(tensor, tensor.is_on_device ? device_bytes : payload_bytes))
        return std::nullopt;
    } else if (dims != 0) {
      return std::nullopt;
    }
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

}  // namespace trireme::shm
