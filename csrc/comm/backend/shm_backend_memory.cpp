// Tensors in memory that the ranks of a host can share, and windows on them.

#include <trireme/comm/backend/memory.h>
#include <trireme/comm/backend/shm_backend_class.h>
#include <trireme/comm/backend/window.h>

#include <ATen/EmptyTensor.h>

namespace trireme {

std::shared_ptr<c10::Allocator> ShmBackend::getMemAllocator() { return shm_allocator(); }

at::Tensor ShmBackend::allocateTensor(long size, at::TensorOptions options) {
  TORCH_CHECK_VALUE(size >= 0 && options.device().is_cpu(),
                    error_text("shm_backend",
                               "allocate_tensor got " + std::to_string(size) + " elements on " +
                                   options.device().str(),
                               where_, "Ask for elements on the CPU."));
  const auto dtype = at::typeMetaToScalarType(options.dtype());
  return at::Tensor(at::detail::empty_generic({size}, shm_allocator().get(),
                                              c10::DispatchKeySet(c10::DispatchKey::CPU), dtype,
                                              std::nullopt));
}

void ShmBackend::note(const shm::Fault& fault) noexcept { hooks_->failed(fault); }

c10::intrusive_ptr<Window> ShmBackend::new_window(const std::optional<at::Tensor>& tensor) {
  TORCH_CHECK_VALUE(shares_memory(),
                    error_text("shm_backend", "new_window got ranks on several hosts", where_,
                               "Make a group of ranks that share one."));
  auto window = c10::make_intrusive<ShmWindow>(c10::intrusive_ptr<ShmBackend>::reclaim_copy(this));
  if (tensor) window->tensor_register(*tensor, /*owning=*/true);
  return window;
}

}  // namespace trireme
