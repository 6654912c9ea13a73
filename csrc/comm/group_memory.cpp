#include <trireme/comm/group_memory.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <utility>

namespace trireme {

std::function<at::DataPtr(int64_t bytes)> memory_of(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, c10::Device device) {
  const auto backend = group->getBackend(device.type());
  if (!backend->supportsTensorAlloc(device.index())) return {};
  return [group, backend, device](int64_t bytes) -> at::DataPtr {
    const auto options = at::TensorOptions().dtype(at::kByte).device(device);
    auto block = std::make_unique<at::Tensor>(backend->allocateTensor(bytes, options));
    void* data = block->mutable_data_ptr();
    return {data, block.release(), [](void* context) { delete static_cast<at::Tensor*>(context); },
            device};
  };
}

}  // namespace trireme
