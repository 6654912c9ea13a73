#include <trireme/memory/flat_buffer.h>

#include <trireme/common/error.h>

#include <ATen/ATen.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

namespace trireme {
namespace {

constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which older headers lack

}  // namespace

at::Tensor lazy_zeros(int64_t numel, at::ScalarType dtype, c10::Device device) {
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  if (!device.is_cpu() || numel == 0) return at::zeros({numel}, options);
  const size_t bytes = static_cast<size_t>(numel) * c10::elementSize(dtype);
  void* pages = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK_WITH(
      OutOfMemoryError, pages != MAP_FAILED,
      error_text("flat_buffer", "got no address space for " + std::to_string(bytes) + " bytes", {},
                 "Raise the limit of virtual memory (ulimit -v)."));
  // A huge page would include memory of others.
  ::madvise(pages, bytes, MADV_NOHUGEPAGE);
  return at::from_blob(pages, {numel}, [bytes](void* mapped) { ::munmap(mapped, bytes); }, options);
}

void make_zero(const at::Tensor& lazy, int64_t begin, int64_t numel) {
  if (numel == 0) return;
  if (!lazy.is_cpu()) {
    lazy.narrow(0, begin, numel).zero_();
    return;
  }
  const auto element = static_cast<int64_t>(lazy.element_size());
  auto* data = static_cast<std::byte*>(lazy.mutable_data_ptr()) + begin * element;
  const int64_t bytes = numel * element;
  const auto page = static_cast<int64_t>(::sysconf(_SC_PAGESIZE));
  const auto past_page = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data)) % page;
  const int64_t head = std::min(bytes, (page - past_page) % page);
  const int64_t whole = (bytes - head) / page * page;
  std::memset(data, 0, static_cast<size_t>(head));
  if (whole > 0) ::madvise(data + head, static_cast<size_t>(whole), MADV_DONTNEED);
  std::memset(data + head + whole, 0, static_cast<size_t>(bytes - head - whole));
}

void bring_pages(const at::Tensor& tensor) {
  if (!tensor.is_cpu() || !tensor.has_storage() || tensor.storage().nbytes() == 0) return;
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<uintptr_t>(tensor.storage().data());
  const uintptr_t begin = first / page * page;
  // Pages that do not come now come when they are touched.
  ::madvise(reinterpret_cast<void*>(begin), first + tensor.storage().nbytes() - begin,
            kPopulateWrite);
}

at::Tensor range_of(const at::Tensor& buffer, at::IntArrayRef sizes, at::IntArrayRef strides,
                    int64_t offset) {
  const c10::DispatchKeySet keys(
      c10::computeDispatchKey(buffer.scalar_type(), at::kStrided, buffer.device()));
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(buffer.storage()), keys,
                                                               buffer.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

}  // namespace trireme
