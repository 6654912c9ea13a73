#include <trireme/saving/global_batch.h>

#include <trireme/bindings/bindings.h>

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <utility>

namespace trireme {

namespace py = pybind11;

void bind_global_batch(py::module_& module) {
  using torch::wrap_pybind_function;
  py::class_<BatchPart>(module, "BatchPart")
      .def_readonly("number", &BatchPart::number)
      .def_readonly("epoch", &BatchPart::epoch)
      .def_readonly("rows", &BatchPart::rows)
      .def_readonly("weight", &BatchPart::weight);

  py::class_<GlobalBatch>(module, "GlobalBatch")
      .def(py::init(
               wrap_pybind_function([](int64_t rows, int64_t size, bool shuffle, int64_t seed,
                                       std::vector<double> balance, int64_t rank, int64_t world) {
                 return GlobalBatch({.rows = rows,
                                     .size = size,
                                     .shuffle = shuffle,
                                     .seed = seed,
                                     .balance = std::move(balance),
                                     .where = RankOf{rank, world}});
               })),
           py::arg("rows"), py::arg("size"), py::arg("shuffle"), py::arg("seed"),
           py::arg("balance"), py::arg("rank"), py::arg("world"))
      .def("whole", wrap_pybind_function(&GlobalBatch::whole), py::arg("step"))
      .def("part",
           wrap_pybind_function([](GlobalBatch& batch, int64_t step) { return batch.part(step); }),
           py::arg("step"))
      .def("part_of",
           wrap_pybind_function([](GlobalBatch& batch, int64_t step, int64_t rank, int64_t world) {
             return batch.part(step, {rank, world});
           }),
           py::arg("step"), py::arg("rank"), py::arg("world"))
      .def("state", wrap_pybind_function(&GlobalBatch::state))
      .def("load_state", wrap_pybind_function(&GlobalBatch::load_state), py::arg("text"))
      .def_property_readonly("rank", [](const GlobalBatch& batch) { return batch.where().rank; })
      .def_property_readonly("world", [](const GlobalBatch& batch) { return batch.where().world; });
}

}  // namespace trireme
