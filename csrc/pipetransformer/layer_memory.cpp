#include <trireme/pipetransformer/layer_memory.h>

#include <trireme/memory/storage_access.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace trireme {

std::vector<int64_t> memory_strides(const at::Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->is_non_overlapping_and_dense()) return tensor.strides().vec();
  std::vector<int64_t> strides(tensor.sizes().size(), 1);
  for (size_t i = strides.size(); i > 1; --i)
    strides[i - 2] = strides[i - 1] * std::max<int64_t>(tensor.sizes()[i - 1], 1);
  return strides;
}

bool has_memory(const at::Tensor& tensor) {
  return tensor.numel() == 0 || tensor.storage().nbytes() > 0;
}

void free_memory(const at::Tensor& tensor, const std::string& text) {
  if (tensor.numel() == 0 || !has_memory(tensor)) return;
  const at::NoGradGuard no_grad;
  c10::Storage storage(c10::Storage::use_byte_size_t(), /*size_bytes=*/0,
                       at::DataPtr(nullptr, tensor.device()), /*allocator=*/nullptr,
                       /*resizable=*/false);
  c10::StorageImpl& without = *storage.unsafeGetStorageImpl();
  auto empty = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), tensor.key_set(),
                                                        tensor.dtype());
  empty.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), memory_strides(tensor));
  tensor.set_data(empty);
  refuse_access(without, text);
}

at::Tensor memory_like(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), memory_strides(tensor), tensor.options());
}

void take_memory(const at::Tensor& tensor, const at::Tensor& memory) {
  const at::NoGradGuard no_grad;
  tensor.set_data(memory);
}

}  // namespace trireme
