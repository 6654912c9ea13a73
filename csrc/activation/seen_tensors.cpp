#include <trireme/activation/seen_tensors.h>

#include <ATen/ATen.h>

#include <utility>

namespace trireme {
namespace {

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage()
             ? tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()
             : nullptr;
}

const void* address_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.const_data_ptr() : nullptr;
}

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
}

}  // namespace

void SeenTensors::add(const at::Tensor& tensor) {
  WeakStorage storage{c10::intrusive_ptr<c10::StorageImpl>()};
  if (tensor.has_storage()) storage = tensor.storage().getWeakStorageImpl();
  seen_.push_back({WeakTensor(tensor.getIntrusivePtr()), std::move(storage), address_of(tensor),
                   version_of(tensor)});
}

bool SeenTensors::is_unchanged(size_t place, const at::Tensor& tensor) const {
  if (place >= seen_.size()) return false;
  const Seen& seen = seen_[place];
  return seen.tensor._unsafe_get_target() == tensor.unsafeGetTensorImpl() &&
         seen.storage._unsafe_get_target() == storage_of(tensor) &&
         seen.data == address_of(tensor) && seen.version == version_of(tensor);
}

}  // namespace trireme
