#include <trireme/bindings/bindings.h>
#include <trireme/common/error.h>
#include <trireme/grad/codes/hook_coder.h>
#include <trireme/grad/codes/kept_codes.h>
#include <trireme/saving/saved_codes.h>

#include <ATen/ATen.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace trireme {
namespace {

namespace py = pybind11;

void refuse(const char* argument, const std::string& got, const char* expected) {
  TORCH_CHECK_VALUE(
      false, error_text("compression",
                        std::string("got ") + argument + "='" + got + "', expected " + expected, {},
                        "Leave it out for the default."));
}

Between between_of(const std::string& name) {
  if (name != "hosts" && name != "ranks") refuse("between", name, "'hosts' or 'ranks'");
  return name == "hosts" ? Between::kHosts : Between::kRanks;
}

Rounding rounding_of(const std::string& name) {
  if (name != "nearest" && name != "stochastic")
    refuse("rounding", name, "'nearest' or 'stochastic'");
  return name == "nearest" ? Rounding::kNearest : Rounding::kStochastic;
}

using Codes = std::vector<KeptCodes>;

// Gives parameters the names of the plain model.
void rename(KeptCodes& codes, const std::vector<std::string>& names, const std::string& prefix) {
  for (size_t i = 0; i < names.size(); ++i) codes.parameters.at(i).name = names[i];
  codes.prefix = prefix + codes.prefix;
}

// Returns sender, first element and values by name.
py::dict residuals_of(const KeptCodes& codes) {
  py::dict found;
  for (const KeptPart& part : codes.parts(/*makes=*/false))
    if (part.kept->residual.defined())
      found[py::str(part.name)] = py::make_tuple(part.sender, part.begin, part.kept->residual);
  return found;
}

template <typename Method>
Method checked(Method method) {
  check(method);
  return method;
}

template <typename Method>
void define_cast(py::module_& module, const char* name) {
  py::class_<Method>(module, name)
      .def(py::init([](bool error_feedback, int64_t dense_below, const std::string& between) {
             return checked(Method{error_feedback, dense_below, between_of(between)});
           }),
           py::kw_only(), py::arg("error_feedback"), py::arg("dense_below"), py::arg("between"));
}

template <typename Method>
void define_blocks(py::module_& module, const char* name) {
  py::class_<Method>(module, name)
      .def(py::init([](int64_t block, bool error_feedback, int64_t dense_below,
                       const std::string& between) {
             return checked(Method{block, error_feedback, dense_below, between_of(between)});
           }),
           py::kw_only(), py::arg("block"), py::arg("error_feedback"), py::arg("dense_below"),
           py::arg("between"));
}

}  // namespace

void init_compression(py::module_& module) {
  define_cast<Fp16>(module, "Fp16");
  define_cast<Bf16>(module, "Bf16");
  define_blocks<Int4>(module, "Int4");
  define_blocks<Sign>(module, "Sign");
  py::class_<Int8>(module, "Int8")
      .def(py::init([](int64_t block, const std::string& rounding, bool error_feedback,
                       int64_t dense_below, const std::string& between) {
             return checked(Int8{block, rounding_of(rounding), error_feedback, dense_below,
                                 between_of(between)});
           }),
           py::kw_only(), py::arg("block"), py::arg("rounding"), py::arg("error_feedback"),
           py::arg("dense_below"), py::arg("between"));
  py::class_<TopK>(module, "TopK")
      .def(py::init([](double density, std::optional<int64_t> chunk, int64_t bits, bool exact,
                       double decay, bool error_feedback, int64_t dense_below,
                       const std::string& between) {
             return checked(TopK{density, chunk, bits, exact, decay, error_feedback, dense_below,
                                 between_of(between)});
           }),
           py::kw_only(), py::arg("density"), py::arg("chunk"), py::arg("bits"), py::arg("exact"),
           py::arg("decay"), py::arg("error_feedback"), py::arg("dense_below"), py::arg("between"));
  py::class_<RandomK>(module, "RandomK")
      .def(py::init([](double density, int64_t seed, bool error_feedback, int64_t dense_below,
                       const std::string& between) {
             return checked(
                 RandomK{density, seed, error_feedback, dense_below, between_of(between)});
           }),
           py::kw_only(), py::arg("density"), py::arg("seed"), py::arg("error_feedback"),
           py::arg("dense_below"), py::arg("between"));
  py::class_<PowerSGD>(module, "PowerSGD")
      .def(py::init([](int64_t rank, int64_t start_step, double min_ratio, int64_t seed,
                       bool error_feedback, int64_t dense_below, const std::string& between) {
             return checked(PowerSGD{rank, start_step, min_ratio, seed, error_feedback, dense_below,
                                     between_of(between)});
           }),
           py::kw_only(), py::arg("rank"), py::arg("start_step"), py::arg("min_ratio"),
           py::arg("seed"), py::arg("error_feedback"), py::arg("dense_below"), py::arg("between"));
  using torch::wrap_pybind_function_no_gil;
  py::class_<HookCoder>(module, "HookCoder")
      .def(py::init(wrap_pybind_function_no_gil(
               [](const std::shared_ptr<Communicator>& ranks, const Compression& compression) {
                 return std::make_unique<HookCoder>(ranks, compression);
               })),
           py::arg("ranks"), py::arg("compression"))
      .def("average", wrap_pybind_function_no_gil(&HookCoder::average), py::arg("buffer"),
           py::arg("parameters"), py::arg("names"), py::arg("index"));
  py::class_<KeptCodes>(module, "KeptCodes")
      .def("rename", &rename, py::arg("names"), py::arg("prefix"))
      .def_property_readonly("names",
                             [](const KeptCodes& codes) {
                               std::vector<std::string> names;
                               for (const ParameterInfo& info : codes.parameters)
                                 names.push_back(info.name);
                               return names;
                             })
      .def_readonly("tensors", &KeptCodes::tensors)
      .def("residuals", &residuals_of);
  module.def("codes_to_save", wrap_pybind_function_no_gil(&codes_to_save), py::arg("codes"));
  module.def("check_codes",
             wrap_pybind_function_no_gil([](const Codes& codes, const CheckpointSource& source,
                                            std::pair<int64_t, int64_t> where) {
               check_codes(codes, source, {where.first, where.second});
             }),
             py::arg("codes"), py::arg("source"), py::arg("where"));
  module.def("load_codes",
             wrap_pybind_function_no_gil([](const Codes& codes, const CheckpointSource& source,
                                            std::pair<int64_t, int64_t> where) {
               load_codes(codes, source, {where.first, where.second});
             }),
             py::arg("codes"), py::arg("source"), py::arg("where"));
  module.def("check_same_compression", wrap_pybind_function_no_gil(&check_same_compression),
             py::arg("communicator"), py::arg("compression"));
  module.def(
      "code_bytes",
      [](const Compression& compression, const std::vector<int64_t>& sizes) {
        return code_bytes(compression, matrix_shape(sizes));
      },
      py::arg("compression"), py::arg("sizes"));
}

}  // namespace trireme
