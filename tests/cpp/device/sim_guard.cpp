// What torch asks a device for: streams, events, the current ones; and its kinds of memory.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <device/sim_device.h>
#include <device/sim_stream.h>
#include <memory>
#include <utility>
#include <vector>

namespace trireme::test {
namespace {

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kSimDevices> current_streams{};

struct SimGuard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kSim;

  SimGuard() = default;
  explicit SimGuard(c10::DeviceType /*sim*/) {}

  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device earlier = getDevice();
    setDevice(device);
    return earlier;
  }
  c10::Device getDevice() const override { return {kSim, current_device}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kSimDevices; }

  c10::Stream getStream(c10::Device device) const override {
    const c10::Device own = device.has_index() ? device : getDevice();
    return stream(own, current_streams.at(static_cast<size_t>(own.index())));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(device.has_index() ? device : getDevice(), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high_priority*/) const override {
    static std::array<std::atomic<c10::StreamId>, kSimDevices> next{};
    const c10::Device own = device.has_index() ? device : getDevice();
    return stream(own, 1 + next.at(static_cast<size_t>(own.index()))++ % (kSimStreams - 1));
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return getStreamFromGlobalPool(device, false);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const c10::Stream earlier = getStream(next.device());
    current_streams.at(static_cast<size_t>(next.device_index())) = next.id();
    return earlier;
  }
  void* getStreamNativeHandle(const c10::Stream next) const override { return &sim_stream(next); }
  bool queryStream(const c10::Stream& asked) const override {
    SimStream& own = sim_stream(asked);
    return own.is_done(own.last());
  }
  void synchronizeStream(const c10::Stream& asked) const override {
    SimStream& own = sim_stream(asked);
    own.wait(own.last());
  }
  void synchronizeDevice(c10::DeviceIndex index) const override {
    test::synchronize(sim_device(index));
  }

  void record(void** event, const c10::Stream& recorded, c10::DeviceIndex /*index*/,
              c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) *event = new SimEvent;
    *static_cast<SimEvent*>(*event) = event_of(sim_stream(recorded));
  }
  void block(void* event, const c10::Stream& waiting) const override {
    if (event != nullptr) test::block(sim_stream(waiting), *static_cast<SimEvent*>(event));
  }
  bool queryEvent(void* event) const override {
    const auto* asked = static_cast<SimEvent*>(event);
    return asked == nullptr || asked->stream == nullptr || asked->stream->is_done(asked->ticket);
  }
  void synchronizeEvent(void* event) const override {
    const auto* asked = static_cast<SimEvent*>(event);
    if (asked != nullptr && asked->stream != nullptr) asked->stream->wait(asked->ticket);
  }
  void destroyEvent(void* event, c10::DeviceIndex /*index*/) const noexcept override {
    delete static_cast<SimEvent*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& reader) const override {
    record_stream(data, reader);
  }

 private:
  static c10::Stream stream(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, device, id);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, SimGuard);

struct SimHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*index*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kSimDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current_device = index; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(current_device, index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  c10::Device getDeviceFromPtr(void* address) const override { return device_of(address); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex /*index*/) const override {
    return at::detail::getDefaultCPUGenerator();
  }
};

const bool is_registered = [] {
  static SimHooks hooks;
  c10::register_privateuse1_backend("sim");
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(kSim, &sim_allocator());
  return true;
}();

}  // namespace

void use_sim_device(c10::Device device) {
  TORCH_CHECK(is_registered);
  current_device = device.index();
  current_streams.at(static_cast<size_t>(device.index())) = 0;
}

void move_to(torch::nn::Module& module, c10::Device device) {
  std::vector<at::Tensor> tensors = module.parameters();
  for (const at::Tensor& buffer : module.buffers()) tensors.push_back(buffer);
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor there = tensor.detach().to(device);
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(there.storage());
    tensor.unsafeGetTensorImpl()->_change_backend_component_keys(device);
  }
}

}  // namespace trireme::test
