#include <trireme/strategies/remote/remote_module_session.h>

#include <trireme/activation/kept_tensor.h>
#include <trireme/common/error.h>
#include <trireme/module/autograd_node.h>
#include <trireme/module/backward_anchors.h>
#include <trireme/strategies/remote/carried_autocast.h>
#include <trireme/strategies/remote/value_tensors.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

// See [Note: steps beside graphs] in remote_module_session.h.

namespace trireme::remote {
namespace {

template <typename T>
const T& field(const CallMessage& call, size_t place) {
  const T* found = place < call.args.size() ? call.args[place].get_if<T>() : nullptr;
  if (found == nullptr) refuse_message("of another form");
  return *found;
}

// An alias of a saved parameter, which keeps the parameter's old memory.
class PackedParameter final : public PackedSavedTensor {
 public:
  explicit PackedParameter(const at::Tensor& parameter) : alias_(parameter.variable_data()) {}
  at::Tensor unpack() override { return alias_; }

 private:
  at::Tensor alias_;
};

class ParameterPacker final : public SavedTensorPacker {
 public:
  explicit ParameterPacker(const ModuleBody::Named& parameters) {
    for (const auto& [name, parameter] : parameters)
      parameters_.insert(parameter.unsafeGetTensorImpl());
  }
  c10::intrusive_ptr<PackedSavedTensor> pack(const at::Tensor& tensor) override {
    if (parameters_.contains(tensor.unsafeGetTensorImpl()))
      return c10::make_intrusive<PackedParameter>(tensor);
    return c10::make_intrusive<KeptTensor>(tensor);
  }

 private:
  std::unordered_set<const c10::TensorImpl*> parameters_;
};

// Hands on the gradient of an input to its leaf. The input is no leaf, so a module may write into
// it.
class InputBackward final : public torch::autograd::Node {
 public:
  explicit InputBackward(torch::autograd::edge_list leaf) : Node(std::move(leaf)) {}
  std::string name() const override { return "RemoteInputBackward"; }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    return std::move(gradients);
  }
};

// Makes the argument tensors that want a gradient results of new leaves, which it returns.
std::vector<at::Tensor> make_leaves(CallMessage& call, const std::unordered_set<int64_t>& wanted) {
  std::vector<at::Tensor> leaves;
  int64_t number = 0;
  const auto make = [&](at::Tensor& tensor) {
    if (!wanted.contains(number++)) return;
    if (!torch::autograd::isDifferentiableType(tensor.scalar_type()))
      refuse_message("of another form");
    leaves.push_back(tensor.detach().requires_grad_());
    // This is no view, and has a version counter of its own: nothing has saved the leaf.
    tensor = leaves.back().variable_data();
    torch::autograd::set_history(tensor, make_node<InputBackward>(torch::autograd::edge_list{
                                             torch::autograd::impl::gradient_edge(leaves.back())}));
  };
  change_tensors(call.args[3], make);
  change_tensors(call.args[4], make);
  return leaves;
}

}  // namespace

struct RemoteModuleSession::Graph {
  explicit Graph(std::shared_ptr<OwnedModule> module) : in_flight(std::move(module)) {}

  OwnedModule::InFlight in_flight;
  std::vector<at::Tensor> outputs = {};  // tensors that require grad
  std::vector<at::Tensor> leaves = {};   // inputs that want one
  ModuleBody::Named parameters = {};     // that require a gradient
  std::vector<at::Tensor> anchors = {};
};

Value RemoteModuleSession::serve(Verb verb, CallMessage& call, const OwnedModule::Use::Wait& wait) {
  switch (verb) {
    case Verb::kForward:
      return forward(call, wait);
    case Verb::kBackward:
      return backward(call);
    case Verb::kStep:
      step(wait);
      return {};
    case Verb::kZeroGrad: {
      const std::lock_guard lock(mutex_);
      gradients_.clear();
      return {};
    }
    case Verb::kState:
      return state(call, wait);
    case Verb::kLoad:
      load(call, wait);
      return {};
    case Verb::kParameters:
      return parameters();
    default:
      refuse_message("of another form");
  }
}

Value RemoteModuleSession::forward(CallMessage& call, const OwnedModule::Use::Wait& wait) {
  const bool training = field<bool>(call, 0);
  const bool wants_graph = field<bool>(call, 1);
  std::unordered_set<int64_t> wanted;
  for (const Value& number : field<List>(call, 2).items) {
    const auto* integer = number.get_if<int64_t>();
    if (integer == nullptr) refuse_message("of another form");
    wanted.insert(*integer);
  }
  field<Tuple>(call, 3);
  field<Dict>(call, 4);
  if (call.args.size() != 6) refuse_message("of another form");
  const OwnedModule::Use use(*module_, training, wait);
  auto graph = wants_graph ? std::make_shared<Graph>(module_) : nullptr;
  std::vector<at::Tensor> leaves = make_leaves(call, wanted);
  const ModuleBody::Named parameters = module_->body().parameters();
  const BackwardAnchors nested;
  Value result;
  {
    const at::AutoGradMode grad_mode(wants_graph);
    std::optional<PackerGuard> packer;
    if (wants_graph) packer.emplace(c10::make_intrusive<ParameterPacker>(parameters));
    const CarriedAutocast autocast(call.args[5]);
    result = module_->body().forward(field<Tuple>(call, 3).items, field<Dict>(call, 4));
  }
  List with_gradient;
  int64_t number = 0;
  change_tensors(result, [&](at::Tensor& tensor) {
    if (graph && tensor.requires_grad()) {
      graph->outputs.push_back(tensor);
      with_gradient.items.emplace_back(number);
    }
    ++number;
    tensor = tensor.detach();
  });
  int64_t forward = -1;
  if (graph && !graph->outputs.empty()) {
    graph->leaves = std::move(leaves);
    graph->anchors = nested.anchors();
    std::copy_if(parameters.begin(), parameters.end(), std::back_inserter(graph->parameters),
                 [](const auto& parameter) { return parameter.second.requires_grad(); });
    const std::lock_guard lock(mutex_);
    forward = next_++;
    graphs_.emplace(forward, std::move(graph));
  }
  return Tuple{{forward, std::move(result), std::move(with_gradient)}};
}

Value RemoteModuleSession::backward(const CallMessage& call) {
  const int64_t number = field<int64_t>(call, 0);
  const Values& given = field<List>(call, 1).items;
  if (call.args.size() != 3) refuse_message("of another form");
  std::shared_ptr<Graph> graph;
  {
    const std::lock_guard lock(mutex_);
    auto node = graphs_.extract(number);
    if (!node.empty()) graph = std::move(node.mapped());
  }
  TORCH_CHECK(graph, error_text("remote",
                                "Trying to backward through the graph a second time: the owner has "
                                "freed it",
                                {}, "Call the module again."));
  if (given.size() != graph->outputs.size()) refuse_message("of another form");
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < given.size(); ++i) {
    const auto* gradient = given[i].get_if<at::Tensor>();
    if (gradient == nullptr) continue;
    outputs.push_back(graph->outputs[i]);
    gradients.push_back(*gradient);
  }
  std::vector<at::Tensor> inputs = graph->leaves;
  for (const auto& [name, parameter] : graph->parameters) inputs.push_back(parameter);
  inputs.insert(inputs.end(), graph->anchors.begin(), graph->anchors.end());
  std::vector<at::Tensor> found(inputs.size());
  const CarriedAutocast autocast(call.args[2]);
  if (!outputs.empty() && !inputs.empty())
    found = torch::autograd::grad(outputs, inputs, gradients, /*retain_graph=*/false,
                                  /*create_graph=*/false, /*allow_unused=*/true);
  const size_t leaves = graph->leaves.size();
  {
    const std::lock_guard lock(mutex_);
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < graph->parameters.size(); ++i) {
      const at::Tensor& own = found[leaves + i];
      if (!own.defined()) continue;
      at::Tensor& sum = gradients_[graph->parameters[i].first];
      sum = sum.defined() && sum.sizes() == own.sizes() ? sum + own : own.detach();
    }
  }
  List result;
  for (size_t i = 0; i < leaves; ++i)
    found[i].defined() ? result.items.emplace_back(dense(found[i].detach()))
                       : result.items.emplace_back();
  return result;
}

void RemoteModuleSession::step(const OwnedModule::Use::Wait& wait) {
  TORCH_CHECK(optimizer_, error_text("remote", "got step() of a module without an optimizer", {},
                                     "Pass optimizer= to remote.Module."));
  const OwnedModule::Use use(*module_, std::nullopt, wait);
  const bool afresh = module_->is_in_flight();
  const ModuleBody::Named parameters = module_->body().parameters();
  const std::lock_guard lock(mutex_);
  for (const auto& [name, gradient] : gradients_) {
    const auto there = std::find_if(parameters.begin(), parameters.end(),
                                    [&](const auto& parameter) { return parameter.first == name; });
    TORCH_CHECK(
        there != parameters.end(),
        error_text("remote", "got a gradient of '" + name + "', which the module has no more", {},
                   "Call zero_grad() after the module has changed."));
    step_parameter(*optimizer_, there->second, gradient, states_[name], afresh);
  }
}

Value RemoteModuleSession::state(const CallMessage& call, const OwnedModule::Use::Wait& wait) {
  const auto* wanted = call.args.empty() ? nullptr : call.args[0].get_if<std::string>();
  const OwnedModule::Use use(*module_, std::nullopt, wait);
  Dict state;
  for (const auto& [name, tensor] : module_->body().state()) {
    if (wanted != nullptr && name != *wanted) continue;
    state.keys.emplace_back(name);
    state.values.emplace_back(tensor.detach().clone());  // a step may come before it is sent
  }
  return state;
}

void RemoteModuleSession::load(const CallMessage& call, const OwnedModule::Use::Wait& wait) {
  const Dict& given = field<Dict>(call, 0);
  const OwnedModule::Use use(*module_, std::nullopt, wait);
  const ModuleBody::Named own = module_->body().state();
  const auto find = [&](const Value& key) -> const std::pair<std::string, at::Tensor>& {
    const auto* name = key.get_if<std::string>();
    const auto there = std::find_if(own.begin(), own.end(), [&](const auto& entry) {
      return name != nullptr && entry.first == *name;
    });
    TORCH_CHECK_VALUE(there != own.end(),
                      error_text("remote",
                                 "got '" + (name != nullptr ? *name : std::string()) +
                                     "', which the module does not have",
                                 {}, "Load what a module of the same kind has saved."));
    return *there;
  };
  // All values are checked before any is written.
  for (size_t i = 0; i < given.keys.size(); ++i) {
    const auto* values = given.values[i].get_if<at::Tensor>();
    if (values == nullptr) refuse_message("of another form");
    TORCH_CHECK_VALUE(
        values->sizes() == find(given.keys[i]).second.sizes(),
        error_text("remote", "got '" + find(given.keys[i]).first + "' of another shape", {},
                   "Load what a module of the same kind has saved."));
  }
  const bool afresh = module_->is_in_flight();
  std::unordered_set<const c10::TensorImpl*> is_parameter;
  for (const auto& [name, parameter] : module_->body().parameters())
    is_parameter.insert(parameter.unsafeGetTensorImpl());
  for (size_t i = 0; i < given.keys.size(); ++i) {
    const auto& [name, tensor] = find(given.keys[i]);
    // Autograd may have saved a buffer as itself: it is written in place, so that graphs notice.
    write_values(tensor, *given.values[i].get_if<at::Tensor>(), name,
                 afresh && is_parameter.contains(tensor.unsafeGetTensorImpl()));
  }
}

Value RemoteModuleSession::parameters() {
  List all;
  for (const auto& [name, parameter] : module_->body().parameters()) {
    List sizes;
    for (const int64_t size : parameter.sizes()) sizes.items.emplace_back(size);
    all.items.emplace_back(
        Tuple{{name, std::move(sizes), static_cast<int64_t>(parameter.scalar_type()),
               parameter.requires_grad()}});
  }
  return all;
}

std::shared_ptr<void> RemoteModuleSession::drop(int64_t forward) {
  const std::lock_guard lock(mutex_);
  auto node = graphs_.extract(forward);
  return node.empty() ? nullptr : std::move(node.mapped());
}

}  // namespace trireme::remote
