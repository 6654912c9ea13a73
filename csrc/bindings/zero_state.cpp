#include <trireme/bindings/bindings.h>
#include <trireme/strategies/zero/consolidated_state.h>
#include <trireme/strategies/zero/zero.h>

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace trireme {
namespace {

namespace py = pybind11;

// The state of one parameter; Python passes values that are no tensors as text.
using State = std::map<std::string, std::variant<at::Tensor, std::string>>;

ArchivedValues archived(const State& state) {
  ArchivedValues values;
  for (const auto& [name, value] : state)
    std::visit([&, &key = name](const auto& held) { values[key] = held; }, value);
  return values;
}

State state_of(const ArchivedValues& values) {
  State state;
  for (const auto& [name, value] : values) {
    if (value.isTensor()) {
      state[name] = value.toTensor();
    } else {
      state[name] = value.toStringRef();
    }
  }
  return state;
}

std::vector<State> gather(const std::vector<State>& own,
                          const std::vector<ShardedParameter>& parameters,
                          const std::shared_ptr<Communicator>& communicator, int64_t to) {
  const at::NoGradGuard no_grad;
  std::vector<ArchivedValues> values;
  for (const State& state : own) values.push_back(archived(state));
  std::vector<State> whole;
  for (const ArchivedValues& whole_values : gather_states(values, parameters, *communicator, to))
    whole.push_back(state_of(whole_values));
  return whole;
}

}  // namespace

void init_zero_state(py::module_& module) {
  using torch::wrap_pybind_function_no_gil;
  py::class_<ShardedParameter>(module, "ShardedParameter")
      .def("own_part",
           wrap_pybind_function_no_gil([](const ShardedParameter& parameter, const State& whole,
                                          const std::shared_ptr<Communicator>& communicator) {
             const at::NoGradGuard no_grad;
             return state_of(own_part(archived(whole), parameter, communicator->rank_of()));
           }),
           py::arg("whole"), py::arg("communicator"));
  module.def("gather_states", wrap_pybind_function_no_gil(&gather), py::arg("own"),
             py::arg("parameters"), py::arg("communicator"), py::arg("to"));
}

}  // namespace trireme
