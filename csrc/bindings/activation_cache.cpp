#include <trireme/activation/activation_cache.h>

#include <trireme/activation/prefix_cache.h>
#include <trireme/bindings/bindings.h>

#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace trireme {
namespace {

namespace py = pybind11;
using GivenTensors = std::vector<std::tuple<size_t, std::string, at::Tensor, bool>>;

std::vector<PrefixTensor> prefix_tensors(GivenTensors given) {
  std::vector<PrefixTensor> tensors;
  for (auto& [layer, name, tensor, is_parameter] : given)
    tensors.push_back({layer, std::move(name), std::move(tensor), is_parameter});
  return tensors;
}

}  // namespace

void bind_activation_cache(py::module_& module) {
  using torch::wrap_pybind_function_no_gil;
  using Run = PrefixCache::Run;
  py::class_<CacheStats>(module, "CacheStats")
      .def_readonly("hits", &CacheStats::hits)
      .def_readonly("misses", &CacheStats::misses)
      .def_readonly("bytes", &CacheStats::bytes)
      .def_readonly("depth", &CacheStats::depth)
      .def("__repr__", [](const CacheStats& stats) {
        return c10::str("CacheStats(hits=", stats.hits, ", misses=", stats.misses,
                        ", bytes=", stats.bytes, ", depth=", stats.depth, ")");
      });
  py::class_<ActivationCache, std::shared_ptr<ActivationCache>>(module, "ActivationCache")
      .def(py::init([](int64_t samples, int64_t bytes, std::shared_ptr<Communicator> communicator) {
             const py::gil_scoped_release no_gil;
             return std::make_shared<ActivationCache>(samples, bytes, std::move(communicator));
           }),
           py::arg("samples"), py::arg("bytes"), py::arg("communicator"))
      .def_property_readonly("samples", &ActivationCache::samples)
      .def_property_readonly("entries", &ActivationCache::entries)
      .def_property_readonly("is_off", &ActivationCache::is_off)
      .def("stats", &ActivationCache::stats);
  py::class_<PrefixCache>(module, "PrefixCache")
      .def(py::init([](std::shared_ptr<ActivationCache> cache, std::vector<std::string> layers,
                       bool always) {
             return std::make_unique<PrefixCache>(std::move(cache), std::move(layers), always);
           }),
           py::arg("cache"), py::arg("layers"), py::arg("always"))
      .def("forward",
           wrap_pybind_function_no_gil([](PrefixCache& cache, const at::Tensor& input,
                                          const at::Tensor& ids, GivenTensors tensors,
                                          const Run& run) {
             return cache.forward(input, ids, prefix_tensors(std::move(tensors)), run);
           }),
           py::arg("input"), py::arg("ids"), py::arg("tensors"), py::arg("run"));
}

}  // namespace trireme
