#include <trireme/activation/checkpoint_frame.h>
#include <trireme/activation/checkpoint_plan.h>
#include <trireme/bindings/bindings.h>
#include <trireme/bindings/kept_call.h>
#include <trireme/bindings/saved_tensor_hooks.h>

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

// Calls a function of Python, and throws what it raises.
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
                      c10::intrusive_ptr<TensorPacker> inputs, const py::object& explain) {
  auto kept = std::make_unique<KeptCall>(again, arguments, keywords, explain, with_random);
  const std::vector<at::Tensor> tensors = kept->take_tensors();
  const auto frame = c10::make_intrusive<CheckpointFrame>(
      std::move(kept), tensors,
      CheckpointFrame::Options{early_stop, compares_metadata, std::move(inputs)});
  const py::object result = [&] {
    const CheckpointForward guard(frame);
    return call(forward, arguments, keywords);
  }();
  if (frame->saved() == 0) {
    torch::PyWarningHandler warnings;
    frame->warn_if_useless();
  }
  return result;
}

// Calls a function whose saved tensors go to `packer`.
py::object run_with_packer(c10::intrusive_ptr<TensorPacker> packer, const py::object& function,
                           const py::tuple& arguments, const py::dict& keywords) {
  const PackerGuard guard(std::move(packer));
  return call(function, arguments, keywords);
}

py::tuple plan(const std::vector<int64_t>& bytes, const std::vector<double>& times,
               int64_t budget_bytes) {
  std::vector<LayerCost> layers;
  for (size_t i = 0; i < bytes.size(); ++i) layers.push_back({bytes[i], times.at(i)});
  const CheckpointPlan found = checkpoint_plan(layers, budget_bytes);
  return py::make_tuple(found.recompute, found.bytes, found.extra_time);
}

}  // namespace

void init_activation(py::module_& module) {
  use_python_hooks(module);
  py::class_<TensorPacker, c10::intrusive_ptr<TensorPacker>>(module, "TensorPacker");
  module.def("checkpoint", checkpoint, py::arg("forward"), py::arg("again"), py::arg("arguments"),
             py::arg("keywords"), py::arg("with_random"), py::arg("early_stop"),
             py::arg("compares_metadata"), py::arg("inputs").none(true), py::arg("explain"));
  module.def("run_with_packer", run_with_packer, py::arg("packer"), py::arg("function"),
             py::arg("arguments"), py::arg("keywords"));
  module.def("checkpoint_plan", plan, py::arg("bytes"), py::arg("times"), py::arg("budget_bytes"));
  module.def("segment_bounds", segment_bounds, py::arg("layers"), py::arg("segments"));
  module.def("square_root_segments", square_root_segments, py::arg("layers"));
}

}  // namespace trireme
