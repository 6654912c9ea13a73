#include <trireme/bindings/bindings.h>
#include <trireme/strategies/pipeline/split_backward.h>

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace trireme {
namespace {

namespace py = pybind11;
using Tensors = std::vector<at::Tensor>;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::impl::gradient_edge;

// Returns a held node. Up to torch 2.12 the object of a custom Function holds it weakly.
template <typename Held>
NodePtr locked(const Held& node) {
  if constexpr (std::is_convertible_v<const Held&, NodePtr>) {
    return node;
  } else {
    return node.lock();
  }
}

NodePtr node_of(const py::handle& function) {
  if (THPFunction_Check(function.ptr()))
    return locked(reinterpret_cast<THPFunction*>(function.ptr())->cdata);
  TORCH_CHECK_TYPE(torch::autograd::THPCppFunction_Check(function.ptr()),
                   "expected the node of a torch.autograd.graph.GradientEdge");
  return reinterpret_cast<torch::autograd::THPCppFunction*>(function.ptr())->cdata;
}

// Returns the edge of a tensor, or of a GradientEdge: a tuple of node and number.
Edge edge_of(const py::handle& root) {
  if (THPVariable_Check(root.ptr())) return gradient_edge(THPVariable_Unpack(root.ptr()));
  const auto edge = root.cast<py::tuple>();
  return {node_of(edge[0]), edge[1].cast<uint32_t>()};
}

edge_list edges_of(const Tensors& tensors) {
  edge_list edges;
  for (const at::Tensor& tensor : tensors) {
    edges.push_back(tensor.defined() && tensor.requires_grad() ? gradient_edge(tensor) : Edge());
  }
  return edges;
}

std::unique_ptr<SplitBackward> make_backward(const py::list& roots, Tensors gradients,
                                             const std::vector<std::optional<at::Tensor>>& inputs) {
  edge_list edges;
  for (const py::handle root : roots) edges.push_back(edge_of(root));
  Tensors tensors;
  tensors.reserve(inputs.size());
  for (const auto& input : inputs) tensors.push_back(input.value_or(at::Tensor()));
  return std::make_unique<SplitBackward>(std::move(edges), std::move(gradients), edges_of(tensors));
}

void run_weight_half(SplitBackward& backward, const Tensors& weights) {
  edge_list only;
  for (const Edge& edge : edges_of(weights))
    if (edge.is_valid()) only.push_back(edge);
  if (!only.empty()) backward.weight_half(only);
}

}  // namespace

void bind_split_backward(py::module_& module) {
  py::class_<SplitBackward>(module, "SplitBackward")
      .def(py::init(torch::wrap_pybind_function(make_backward)), py::arg("roots"),
           py::arg("gradients"), py::arg("inputs"))
      .def("input_half", torch::wrap_pybind_function_no_gil(&SplitBackward::input_half))
      .def("weight_half", torch::wrap_pybind_function_no_gil(run_weight_half), py::arg("weights"));
}

}  // namespace trireme
