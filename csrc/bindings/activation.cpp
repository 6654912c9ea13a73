#include <trireme/activation/checkpoint_frame.h>
#include <trireme/activation/checkpoint_plan.h>
#include <trireme/activation/offload.h>
#include <trireme/bindings/bindings.h>
#include <trireme/bindings/kept_call.h>
#include <trireme/bindings/saved_tensor_hooks.h>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/Exceptions.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace trireme {
namespace {

namespace py = pybind11;

// Calls a Python function, and throws the exception that it raises.
py::object call(const py::object& function, const py::tuple& arguments, const py::dict& keywords) {
  PyObject* result = PyObject_Call(function.ptr(), arguments.ptr(), keywords.ptr());
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

// Calls forward(*arguments, **keywords), and `again` with them in the backward. `explain` is called
// with the text of an error before it is raised, or None.
py::object checkpoint(const py::object& forward, const py::object& again,
                      const py::tuple& arguments, const py::dict& keywords, bool with_random,
                      bool early_stop, bool compares_metadata,
                      c10::intrusive_ptr<SavedTensorPacker> inputs, const py::object& explain) {
  if (!at::GradMode::is_enabled()) return call(forward, arguments, keywords);
  auto kept = std::make_unique<KeptCall>(again, arguments, keywords, explain, with_random);
  const std::vector<at::Tensor> tensors = kept->take_tensors();
  const auto frame = c10::make_intrusive<CheckpointFrame>(
      std::move(kept), tensors,
      CheckpointFrame::Options{early_stop, compares_metadata, std::move(inputs)});
  const py::object result = [&] {
    const CheckpointForward guard(frame);
    return call(forward, arguments, keywords);
  }();
  frame->warn_if_useless();
  return result;
}

// Calls a function whose saved tensors go to `packer`.
py::object run_with_packer(c10::intrusive_ptr<SavedTensorPacker> packer, const py::object& function,
                           const py::tuple& arguments, const py::dict& keywords) {
  const PackerGuard guard(std::move(packer));
  return call(function, arguments, keywords);
}

c10::intrusive_ptr<SavedTensorPacker> make_packer(const std::string& folder) {
  return make_offload_packer({folder});
}

std::vector<LayerCost> layers_of(const std::vector<int64_t>& bytes,
                                 const std::vector<double>& times,
                                 const std::vector<int64_t>& kept) {
  std::vector<LayerCost> layers;
  for (size_t i = 0; i < bytes.size(); ++i) {
    layers.push_back({bytes[i], times.at(i), kept.at(i)});
  }
  return layers;
}

py::tuple as_tuple(const CheckpointPlan& plan) {
  return py::make_tuple(plan.recompute, plan.bytes, plan.extra_time);
}

}  // namespace

void init_activation(py::module_& module) {
  use_python_hooks(module);
  py::class_<SavedTensorPacker, c10::intrusive_ptr<SavedTensorPacker>>(module, "SavedTensorPacker");
  bind_activation_cache(module);
  bind_partition(module);
  module.def("checkpoint", torch::wrap_pybind_function(&checkpoint), py::arg("forward"),
             py::arg("again"), py::arg("arguments"), py::arg("keywords"), py::arg("with_random"),
             py::arg("early_stop"), py::arg("compares_metadata"), py::arg("inputs").none(true),
             py::arg("explain"));
  module.def("run_with_packer", torch::wrap_pybind_function(&run_with_packer), py::arg("packer"),
             py::arg("function"), py::arg("arguments"), py::arg("keywords"));
  module.def("make_offload_packer", torch::wrap_pybind_function(&make_packer), py::arg("folder"));
  module.def("offloaded_bytes", [] {
    const OffloadedBytes bytes = offloaded_bytes();
    return py::make_tuple(bytes.now, bytes.written);
  });
  module.def("checkpoint_plan",
             torch::wrap_pybind_function(
                 [](const std::vector<int64_t>& bytes, const std::vector<double>& times,
                    const std::vector<int64_t>& kept, int64_t budget_bytes) {
                   return as_tuple(checkpoint_plan(layers_of(bytes, times, kept), budget_bytes));
                 }),
             py::arg("bytes"), py::arg("times"), py::arg("kept"), py::arg("budget_bytes"));
  module.def("plan_of",
             torch::wrap_pybind_function(
                 [](const std::vector<int64_t>& bytes, const std::vector<double>& times,
                    const std::vector<int64_t>& kept, const std::vector<bool>& recompute) {
                   return as_tuple(plan_of(layers_of(bytes, times, kept), recompute));
                 }),
             py::arg("bytes"), py::arg("times"), py::arg("kept"), py::arg("recompute"));
  module.def("segment_bounds", torch::wrap_pybind_function(&segment_bounds), py::arg("layers"),
             py::arg("segments"));
  module.def("square_root_segments", square_root_segments, py::arg("layers"));
}

}  // namespace trireme
