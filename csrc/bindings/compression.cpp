#include <trireme/bindings/bindings.h>
#include <trireme/common/error.h>
#include <trireme/grad/codes/gradient_coder.h>

#include <ATen/ATen.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <memory>
#include <optional>
#include <string>
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

// The codes of buckets that a communication hook sees.
class HookCoder {
 public:
  HookCoder(const std::shared_ptr<Communicator>& ranks, const Compression& compression)
      : ranks_(ranks) {
    check(compression);
    check_same_compression(*ranks, compression);
    if (has_several_senders(*ranks, between(compression)))
      coder_ = std::make_unique<GradientCoder>(ranks, compression);
  }

  // Averages a bucket in place: the one of that index in a step, whose first is 0.
  void average(const at::Tensor& buffer, const std::vector<at::Tensor>& parameters,
               const std::vector<std::string>& names, int64_t index) {
    const std::string label = "bucket " + std::to_string(index) + ": " + names.front();
    const double scale = 1.0 / static_cast<double>(ranks_->world());
    if (!coder_) {
      buffer.mul_(scale);
      return ranks_->all_reduce({buffer}, ReduceOp::kSum, label).wait();
    }
    if (index == 0) coder_->begin_step();
    CodedBucket bucket{buffer, {}, scale, label};
    int64_t offset = 0;
    for (size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& parameter = parameters[i];
      bucket.parameters.push_back({parameter, names[i], parameter.sizes(), parameter.numel(),
                                   static_cast<int64_t>(i), offset});
      offset += parameter.numel();
    }
    coder_->code(bucket).wait();
  }

 private:
  std::shared_ptr<Communicator> ranks_;
  std::unique_ptr<GradientCoder> coder_;
};

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
  module.def(
      "code_bytes",
      [](const Compression& compression, const std::vector<int64_t>& sizes) {
        return code_bytes(compression, matrix_shape(sizes));
      },
      py::arg("compression"), py::arg("sizes"));
}

}  // namespace trireme
