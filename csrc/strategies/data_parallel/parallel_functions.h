#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

// These are the steps of torch::nn::parallel::data_parallel as functions, on CPU too. Autograd sees
// all of them, so that their results belong to one graph, also with create_graph; unlike
// DataParallel they make replicas in every call.

namespace trireme {

// Returns the pointer of a module holder (TORCH_MODULE) or a shared_ptr to a module; NetIn is the
// type of its module.
template <typename M>
auto module_pointer(const M& module) {
  if constexpr (requires { module.ptr(); }) {
    return module.ptr();
  } else {
    return module;
  }
}
template <typename M>
using NetIn = typename decltype(module_pointer(std::declval<const M&>()))::element_type;

// Cuts `tensor` into one part per device, along `dim` as torch.chunk does: equal but for the last,
// and fewer where rows run out. Parts are views where the device is the same. A 0-dim tensor goes
// to all, where torch refuses it. Throws ValueError without devices and for `dim` out of range.
TRIREME_API std::vector<at::Tensor> scatter(const at::Tensor& tensor,
                                            const std::vector<c10::Device>& devices,
                                            int64_t dim = 0);

// Puts `tensors` one after another along `dim`, on `device`. 0-dim ones become a vector, with a
// warning, as in torch. Throws ValueError for none and for shapes, TypeError for dtypes, that do
// not fit.
TRIREME_API at::Tensor gather(const std::vector<at::Tensor>& tensors, c10::Device device,
                              int64_t dim = 0);

// See replicate() below.
TRIREME_API std::vector<std::shared_ptr<torch::nn::Module>> replicate_module(
    const torch::nn::Module& module, const std::vector<c10::Device>& devices);

// Makes clones of `module` on `devices`, whose parameters are results of its own: they share memory
// where the device is the same, are copied elsewhere, and gradients arrive, summed, in the
// parameters of `module`. Without gradients recorded they require none. Buffers are copies, but for
// replica 0's where it is on the device of `module`. To be made anew after `module` was written.
// Throws NotImplementedError for a module that cannot be cloned (see torch::nn::Cloneable).
template <typename M>
std::vector<M> replicate(const M& module, const std::vector<c10::Device>& devices) {
  std::vector<M> replicas;
  for (const auto& replica : replicate_module(*module_pointer(module), devices))
    replicas.push_back(M(std::dynamic_pointer_cast<NetIn<M>>(replica)));
  return replicas;
}

// Calls job(i) for each device, at the same time, in a thread of its own with that device, the
// caller's grad mode, autocast and streams, and its share of at::get_num_threads(). Throws the
// first exception, a c10::Error with the number of the module.
TRIREME_API void run_in_threads(const std::vector<c10::Device>& devices,
                                const std::function<void(size_t i)>& job);

// Throws ValueError unless `got` is `expected`, and not 0.
TRIREME_API void check_as_many(const std::string& what, size_t got, size_t expected);

// Calls modules[i]->forward(inputs[i]) for all i at the same time, the outputs on `devices`: those
// of the inputs if absent. Cost: a thread for each module.
template <typename M>
std::vector<at::Tensor> parallel_apply(
    const std::vector<M>& modules, const std::vector<at::Tensor>& inputs,
    const std::optional<std::vector<c10::Device>>& devices = std::nullopt) {
  check_as_many("inputs", inputs.size(), modules.size());
  std::vector<c10::Device> places;
  for (const at::Tensor& input : inputs) places.push_back(input.device());
  if (devices) {
    check_as_many("devices", devices->size(), modules.size());
    places = *devices;
  }
  std::vector<at::Tensor> outputs(modules.size());
  run_in_threads(places, [&](size_t i) {
    outputs[i] = module_pointer(modules[i])->forward(inputs[i]).to(places[i]);
  });
  return outputs;
}

// Returns the devices of data_parallel() for `module`, if none are named: all of its kind, and for
// the CPU as many replicas as suit it (core_groups.h).
TRIREME_API std::vector<c10::Device> default_devices(const torch::nn::Module& module);

// Returns module->forward(input), computed by replicas on parts of `input`, with gradients through
// one graph: replicate, scatter, parallel_apply, gather. The output is on the first device if
// `output_device` is absent. With one device the module itself is moved there and called.
template <typename M>
at::Tensor data_parallel(M module, at::Tensor input,
                         std::optional<std::vector<c10::Device>> devices = std::nullopt,
                         std::optional<c10::Device> output_device = std::nullopt, int64_t dim = 0) {
  if (!devices) devices = default_devices(*module_pointer(module));
  std::vector<at::Tensor> inputs = scatter(input, *devices, dim);
  const c10::Device output = output_device.value_or(devices->front());
  if (devices->size() == 1) {
    module->to(devices->front());
    return module->forward(inputs.front()).to(output);
  }
  devices->resize(inputs.size(), devices->front());
  return gather(parallel_apply(replicate(module, *devices), inputs, devices), output, dim);
}

}  // namespace trireme
