#include <trireme/bindings/bindings.h>
#include <trireme/saving/checkpoint_reader.h>
#include <trireme/saving/held_checkpoint.h>

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <memory>
#include <optional>
#include <set>
#include <utility>

namespace trireme {
namespace {

namespace py = pybind11;

CheckpointTensor make_tensor(std::string name, at::ScalarType dtype, std::vector<int64_t> sizes,
                             std::optional<at::Tensor> values, std::vector<int64_t> first) {
  return {std::move(name),
          dtype,
          std::move(sizes),
          {values ? std::move(*values) : at::Tensor(), std::move(first)}};
}

}  // namespace

void init_checkpoint(py::module_& module) {
  using torch::wrap_pybind_function_no_gil;
  py::class_<CheckpointTensor>(module, "CheckpointTensor")
      .def(py::init(&make_tensor), py::arg("name"), py::arg("dtype"), py::arg("sizes"),
           py::arg("values") = py::none(), py::kw_only(), py::arg("first") = std::vector<int64_t>())
      .def("copied", torch::wrap_pybind_function([](const CheckpointTensor& tensor) {
             CheckpointTensor copy = tensor;
             if (copy.part.values.defined()) copy.part.values = copy.part.values.clone();
             return copy;
           }))
      .def_readonly("name", &CheckpointTensor::name)
      .def_readonly("dtype", &CheckpointTensor::dtype)
      .def_readonly("sizes", &CheckpointTensor::sizes);

  py::class_<CheckpointRanks>(module, "CheckpointRanks")
      .def(py::init([](std::shared_ptr<Communicator> communicator, c10::Device device) {
             return CheckpointRanks{std::move(communicator), device};
           }),
           py::arg("communicator"), py::arg("device"))
      .def("some_rank_has_optimizer",
           wrap_pybind_function_no_gil([](const CheckpointRanks& ranks, bool has, bool trains) {
             return some_rank_has_optimizer(has, trains, ranks);
           }),
           py::arg("has"), py::arg("trains"));

  bind_global_batch(module);
  bind_pending_save(module);

  py::class_<CheckpointSource, std::shared_ptr<CheckpointSource>>(module, "CheckpointSource")
      .def("tensors", &CheckpointSource::tensors, py::arg("kind"))
      .def("text", torch::wrap_pybind_function(&CheckpointSource::text), py::arg("name"))
      .def("verify", wrap_pybind_function_no_gil(&CheckpointSource::verify), py::arg("kinds"))
      .def("check", wrap_pybind_function_no_gil(&CheckpointSource::check), py::arg("kind"),
           py::arg("tensors"))
      .def("read", wrap_pybind_function_no_gil(&CheckpointSource::read), py::arg("kind"),
           py::arg("tensors"));

  using Reader = CheckpointReader;
  py::class_<Reader, std::shared_ptr<Reader>, CheckpointSource>(module, "CheckpointReader")
      .def(py::init(
               wrap_pybind_function_no_gil([](const std::string& path, const CheckpointRanks& ranks,
                                              bool reads_once, bool verify) {
                 const ReadOptions options{reads_once, verify ? Verify::kYes : Verify::kNo};
                 return std::make_shared<Reader>(path, ranks, options);
               })),
           py::arg("path"), py::arg("ranks"), py::kw_only(), py::arg("reads_once") = false,
           py::arg("verify") = true);

  using Tensors = std::map<std::string, std::vector<CheckpointTensor>>;
  using Held = HeldCheckpoint;
  py::class_<Held, std::shared_ptr<Held>, CheckpointSource>(module, "HeldCheckpoint")
      .def(py::init(wrap_pybind_function_no_gil([](const CheckpointRanks& ranks, Tensors tensors,
                                                   std::map<std::string, std::string> texts,
                                                   std::set<std::string> of_lowest) {
             HeldContent held{{std::move(tensors), std::move(texts)}, std::move(of_lowest)};
             return std::make_shared<Held>(std::move(held), ranks);
           })),
           py::arg("ranks"), py::kw_only(), py::arg("tensors"), py::arg("texts"),
           py::arg("of_lowest"));
}

}  // namespace trireme
