#include <trireme/activation/partition.h>
#include <trireme/bindings/bindings.h>

#include <torch/csrc/Exceptions.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace trireme {
namespace {

namespace py = pybind11;

// A scope without the GIL, if this thread holds it. Packing and unpacking wait for other ranks, so
// both release it: see [Note: signals while a rank waits]. Destructors do, too: the last one ends a
// Gloo group, which waits for threads that may need the GIL to drop their finished work.
class WithoutInterpreter {
 public:
  WithoutInterpreter() {
    if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) released_.emplace();
  }

 private:
  std::optional<py::gil_scoped_release> released_;
};

class PackedForPython final : public PackedSavedTensor {
 public:
  explicit PackedForPython(c10::intrusive_ptr<PackedSavedTensor> inner)
      : inner_(std::move(inner)) {}
  ~PackedForPython() override {
    const WithoutInterpreter without;
    inner_.reset();
  }

  at::Tensor unpack() override {
    const WithoutInterpreter without;
    return inner_->unpack();
  }

 private:
  c10::intrusive_ptr<PackedSavedTensor> inner_;
};

class PartitionPackerForPython final : public PartitionPacker {
 public:
  explicit PartitionPackerForPython(c10::intrusive_ptr<PartitionPacker> inner)
      : inner_(std::move(inner)) {}
  ~PartitionPackerForPython() override {
    const WithoutInterpreter without;
    inner_.reset();
  }

  c10::intrusive_ptr<PackedSavedTensor> pack(const at::Tensor& tensor) override {
    return inner_->pack(tensor);
  }

  // Throws exceptions that Python sees as torch's.
  std::vector<c10::intrusive_ptr<PackedSavedTensor>> pack_inputs(
      const std::vector<at::Tensor>& inputs, const std::string& function) override {
    HANDLE_TH_ERRORS
    const WithoutInterpreter without;
    auto packed = inner_->pack_inputs(inputs, function);
    for (auto& item : packed)
      if (item) item = c10::make_intrusive<PackedForPython>(std::move(item));
    return packed;
    END_HANDLE_TH_ERRORS_PYBIND
  }

  PartitionMemory memory() const override {
    const WithoutInterpreter without;
    return inner_->memory();
  }

 private:
  c10::intrusive_ptr<PartitionPacker> inner_;
};

c10::intrusive_ptr<PartitionPacker> make(std::shared_ptr<Communicator> communicator) {
  return c10::make_intrusive<PartitionPackerForPython>(
      make_partition_packer(std::move(communicator)));
}

}  // namespace

void bind_partition(py::module_& module) {
  py::class_<PartitionMemory>(module, "PartitionMemory")
      .def_readonly("inputs", &PartitionMemory::inputs)
      .def_readonly("shared", &PartitionMemory::shared)
      .def_readonly("slices", &PartitionMemory::slices)
      .def_readonly("host", &PartitionMemory::host);
  py::class_<PartitionPacker, SavedTensorPacker, c10::intrusive_ptr<PartitionPacker>>(
      module, "PartitionPacker")
      .def_property_readonly("memory", &PartitionPacker::memory);
  module.def("make_partition_packer", torch::wrap_pybind_function_no_gil(&make),
             py::arg("communicator"), "See csrc/activation/partition.h.");
}

}  // namespace trireme
