#include <trireme/pipetransformer/layer_state.h>

#include <trireme/common/error.h>
#include <trireme/saving/held_parts.h>
#include <trireme/saving/optimizer_fields.h>

#include <c10/util/Exception.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <unordered_map>
#include <utility>

namespace trireme {
namespace {

using Json = nlohmann::json;
using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;

// Returns the options of the group that steps a parameter; null for one that is in none.
OptimizerOptions* options_of(Optimizer& optimizer, const at::Tensor& parameter) {
  for (auto& group : optimizer.param_groups())
    for (const at::Tensor& stepped : group.params())
      if (stepped.is_same(parameter)) return &group.options();
  return nullptr;
}

std::unordered_map<std::string, at::Tensor> by_name(const NamedTensors& tensors) {
  return {tensors.begin(), tensors.end()};
}

std::unique_ptr<OptimizerParamState> made_of(const std::string& parameter, const Json& values,
                                             const NamedTensors& tensors,
                                             const OptimizerFields& fields,
                                             const OptimizerOptions& options) {
  const auto named = by_name(tensors);
  auto state = fields.make_state();
  for (const StateField& field : fields.state(*state, options)) {
    if (auto* const* count = std::get_if<int64_t*>(&field.value)) {
      if (values.contains(field.name)) **count = values[field.name].get<int64_t>();
    } else if (const auto found = named.find(parameter + "." + field.name); found != named.end()) {
      *std::get<at::Tensor*>(field.value) = found->second;
    }
  }
  return state;
}

}  // namespace

void check_layer_states(const Optimizer& optimizer) {
  const bool is_sharded = dynamic_cast<const ShardedOptimizer*>(&optimizer) != nullptr;
  if (!is_sharded && fields_of(optimizer) != nullptr) return;
  C10_THROW_ERROR(
      TypeError,
      error_text("pipetransformer",
                 is_sharded ? "got a ZeroRedundancyOptimizer, whose states lie on other ranks"
                            : "got an optimizer of a class whose states are not known",
                 {}, "Use Adam, AdamW, SGD, Adagrad or RMSprop."));
}

MovedState layer_state(Optimizer& optimizer, const NamedTensors& parameters) {
  const OptimizerFields& fields = *fields_of(optimizer);
  MovedState found;
  Json all = Json::object();
  for (const auto& [name, parameter] : parameters) {
    const auto state = optimizer.state().find(parameter.unsafeGetTensorImpl());
    const OptimizerOptions* options = options_of(optimizer, parameter);
    if (state == optimizer.state().end() || options == nullptr) continue;
    Json values = Json::object();
    for (const StateField& field : fields.state(*state->second, *options)) {
      if (auto* const* count = std::get_if<int64_t*>(&field.value)) {
        values[field.name] = **count;
      } else if (const at::Tensor& tensor = *std::get<at::Tensor*>(field.value); tensor.defined()) {
        found.state.emplace_back(name + "." + field.name, tensor);
      }
    }
    all[name] = std::move(values);
  }
  found.values = all.dump();
  return found;
}

void put_layer_state(Optimizer& optimizer, const NamedTensors& parameters,
                     const MovedState& state) {
  const OptimizerFields& fields = *fields_of(optimizer);
  const Json all = Json::parse(state.values);
  for (const auto& [name, parameter] : parameters) {
    const auto values = all.find(name);
    const OptimizerOptions* options = options_of(optimizer, parameter);
    if (values == all.end() || options == nullptr) continue;
    optimizer.state()[parameter.unsafeGetTensorImpl()] =
        made_of(name, *values, state.state, fields, *options);
  }
}

void forget_layer_state(Optimizer& optimizer, const NamedTensors& parameters) {
  for (const auto& [name, parameter] : parameters)
    optimizer.state().erase(parameter.unsafeGetTensorImpl());
}

}  // namespace trireme
