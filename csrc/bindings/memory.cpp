#include <trireme/bindings/bindings.h>
#include <trireme/memory/memory_estimate.h>
#include <trireme/memory/shard_plan.h>

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace trireme {
namespace {

namespace py = pybind11;

ParameterInfo make_info(std::vector<int64_t> sizes, at::ScalarType dtype, bool requires_grad) {
  ParameterInfo info;
  info.numel = 1;
  for (const int64_t size : sizes) info.numel *= size;
  info.sizes = std::move(sizes);
  info.dtype = dtype;
  info.requires_grad = requires_grad;
  return info;
}

OptimizerState state_of(const std::variant<int64_t, std::string>& optimizer) {
  if (const auto* bytes = std::get_if<int64_t>(&optimizer)) return {.bytes = *bytes};
  return optimizer_state(std::get<std::string>(optimizer));
}

py::dict to_dict(const MemoryBytes& bytes) {
  py::dict made;
  made["parameters"] = bytes.parameters;
  made["gradients"] = bytes.gradients;
  made["optimizer"] = bytes.optimizer;
  made["activations"] = bytes.activations;
  made["buffers"] = bytes.buffers;
  return made;
}

}  // namespace

void init_memory(py::module_& module) {
  py::class_<ParameterInfo>(module, "ParameterInfo")
      .def(py::init(&make_info), py::arg("sizes"), py::arg("dtype"), py::arg("requires_grad"))
      .def_readonly("numel", &ParameterInfo::numel);
  const auto estimate =
      [](const std::vector<ParameterInfo>& parameters, const std::string& strategy, int64_t world,
         int64_t ranks_per_host, const std::string& accounting,
         const std::variant<int64_t, std::string>& optimizer,
         std::optional<at::ScalarType> grad_dtype, bool host_params, int64_t unit_numel,
         int64_t activation_bytes, int64_t module_buffer_bytes,
         std::optional<std::pair<int64_t, bool>> limit) {
        const MemoryRequest request{.parameters = parameters,
                                    .strategy = training_strategy(strategy),
                                    .world = world,
                                    .ranks_per_host = ranks_per_host,
                                    .accounting = memory_accounting(accounting),
                                    .optimizer = state_of(optimizer),
                                    .grad_dtype = grad_dtype,
                                    .host_params = host_params,
                                    .unit_numel = unit_numel,
                                    .activation_bytes = activation_bytes,
                                    .module_buffer_bytes = module_buffer_bytes};
        const MemoryEstimate found = estimate_memory(request);
        py::dict made;
        made["rank"] = to_dict(found.rank);
        made["host"] = to_dict(found.host);
        if (limit) made["fewest_ranks"] = fewest_ranks(request, {limit->first, limit->second});
        return made;
      };
  module.def("estimate_memory", torch::wrap_pybind_function(estimate), py::arg("parameters"),
             py::kw_only(), py::arg("strategy"), py::arg("world"), py::arg("ranks_per_host"),
             py::arg("accounting"), py::arg("optimizer"), py::arg("grad_dtype"),
             py::arg("host_params"), py::arg("unit_numel"), py::arg("activation_bytes"),
             py::arg("module_buffer_bytes"), py::arg("limit"),
             "See csrc/memory/memory_estimate.h. A limit is (bytes, of_rank).");
  module.def(
      "chunk_rows",
      [](int64_t rows, int64_t rank, int64_t world) {
        const ChunkRows own = chunk_rows(rows, {rank, world});
        return std::pair(own.first, own.count);
      },
      py::arg("rows"), py::arg("rank"), py::arg("world"));
}

}  // namespace trireme
