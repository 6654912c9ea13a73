#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>
#include <torch/nn/module.h>

#include <cstdint>

namespace trireme::test {

// See [Note: a device of threads] in sim_stream.h. Whoever links these files has the device.

constexpr c10::DeviceType kSim = c10::DeviceType::PrivateUse1;
constexpr c10::StreamId kSimStreams = 33;  // the default one and a pool

inline c10::Device sim_device(int64_t number) {
  return {kSim, static_cast<c10::DeviceIndex>(number)};
}

// Makes a device the calling thread's current one, and its default stream that device's.
void use_sim_device(c10::Device device);

// Does what Module::to() does, which cannot bring what is there to torch's PrivateUse1.
void move_to(torch::nn::Module& module, c10::Device device);

// Returns the same memory for whoever may touch it: tasks of streams.
at::Tensor on_host(const at::Tensor& tensor);
void* on_host(void* address);

c10::Device device_of(const void* address);

c10::Allocator& sim_allocator();
// Does what Tensor.record_stream() does: the memory does not go before what `stream` was given is
// done.
void record_stream(const c10::DataPtr& data, const c10::Stream& stream);
// Bytes that are allocated now on all devices; what was freed counts no more, at once.
int64_t sim_bytes();
// How many bytes more may be allocated, before allocations fail; below 0: any number.
void limit_sim_bytes(int64_t bytes);

c10::Allocator& pinned_allocator();
bool is_pinned(const void* address);
// Whether pinned memory is refused, from now on.
void refuse_pinned(bool refused);

}  // namespace trireme::test
