// Operators of the device: views as everywhere, copies by its streams, the rest by the CPU's.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/resize_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <device/sim_device.h>
#include <device/sim_stream.h>
#include <optional>
#include <utility>

namespace trireme::test {
namespace {

// What operators compute is enqueued while one lives.
thread_local bool computes_on_stream = false;
struct ComputesOnStream {
  ComputesOnStream() { computes_on_stream = true; }
  ~ComputesOnStream() { computes_on_stream = false; }
};

constexpr c10::DispatchKeySet kSimKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> /*layout*/, std::optional<c10::Device> device,
                 std::optional<bool> /*pinned*/, std::optional<c10::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(sizes, &sim_allocator(), kSimKeys, dtype.value_or(at::kFloat),
                                   format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                         std::optional<c10::Device> device, std::optional<bool> /*pinned*/) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, &sim_allocator(), kSimKeys,
                                           dtype.value_or(at::kFloat));
}

// What is there is lost if memory is needed, as nobody here minds.
const at::Tensor& resize_storage(const at::Tensor& self, at::IntArrayRef sizes,
                                 std::optional<c10::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(self.device());
  const size_t bytes = at::detail::computeStorageNbytesContiguous(
      sizes, self.itemsize(), static_cast<size_t>(self.storage_offset()));
  c10::StorageImpl& storage = *self.storage().unsafeGetStorageImpl();
  if (storage.nbytes() < bytes) {
    storage.set_data_ptr(sim_allocator().allocate(bytes));
    storage.set_nbytes(bytes);
  }
  return at::cpu::resize_(self, sizes, format);
}

void wait_for(SimStream& stream) { stream.wait(stream.last()); }

// On CUDA the block of pinned memory is kept by the allocator until the copy is done.
SimStream::Task keeping(const at::Tensor& pinned, SimStream::Task task) {
  return [storage = pinned.storage(), task = std::move(task)] { task(); };
}

bool is_pinned_tensor(const at::Tensor& tensor) { return is_pinned(tensor.storage().data()); }

void to_sim(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  SimStream& stream = sim_stream(current_sim_stream(to.device()));
  const bool is_read_later = non_blocking && is_pinned_tensor(from);
  const at::Tensor source = is_read_later ? from : from.clone();
  const at::Tensor place = on_host(to);
  stream.enqueue(keeping(source, [source, place]() mutable { place.copy_(source); }));
  if (!non_blocking && !computes_on_stream) wait_for(stream);
}

void from_sim(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  SimStream& stream = sim_stream(current_sim_stream(from.device()));
  if (!non_blocking || !is_pinned_tensor(to)) {
    wait_for(stream);
    to.copy_(on_host(from));
    return;
  }
  const at::Tensor source = on_host(from);
  stream.enqueue(keeping(to, [source, to = to.alias()]() mutable { to.copy_(source); }));
}

void between(const at::Tensor& from, const at::Tensor& to) {
  SimStream& stream = sim_stream(current_sim_stream(to.device()));
  SimStream& other = sim_stream(current_sim_stream(from.device()));
  block(stream, event_of(other));
  stream.enqueue([source = on_host(from), place = on_host(to)] { place.copy_(source); });
  block(other, event_of(stream));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (from.numel() == 0) return to;
  const at::Tensor whole = from.sizes() == to.sizes() ? from : from.expand(to.sizes());
  if (from.is_cpu()) {
    to_sim(whole, to, non_blocking);
  } else if (to.is_cpu()) {
    from_sim(whole, to, non_blocking);
  } else {
    between(whole, to);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) resize_storage(to, from.sizes(), std::nullopt);
  return copy_from(from, to, /*non_blocking=*/false);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset,
                        at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::cpu::set_(self, std::move(storage), offset, sizes, strides);
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::cpu::set_(self, source);
}

void record_stream_of(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), stream);
}

void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const ComputesOnStream computes;
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::cpu::as_strided);
  library.impl("view", &at::cpu::view);
  library.impl("_reshape_alias", &at::cpu::_reshape_alias);
  library.impl("resize_", &resize_storage);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("record_stream", &record_stream_of);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>());
}

}  // namespace trireme::test
