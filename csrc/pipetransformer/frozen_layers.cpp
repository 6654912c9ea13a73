#include <trireme/pipetransformer/frozen_layers.h>

#include <trireme/comm/gather_texts.h>
#include <trireme/common/error.h>
#include <trireme/module/averages_gradients.h>
#include <trireme/saving/held_parts.h>
#include <trireme/strategies/fsdp/sharded_module.h>
#include <trireme/strategies/pipeline/pipeline_module.h>
#include <trireme/strategies/zero/zero_cores.h>
#include <trireme/strategies/zero/zero_optimizer.h>

#include <ATen/ATen.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

namespace trireme {
namespace {

using torch::nn::Module;
using Parts = std::vector<GradNormPart>;
// Layers by the gradient, or the parameter, that belongs to them.
using LayerOf = std::unordered_map<const at::TensorImpl*, size_t>;

Module& unwrapped(Module& model) {
  auto* wrapper = dynamic_cast<WrapsModule*>(&model);
  return wrapper == nullptr ? model : unwrapped(wrapper->wrapped());
}

bool is_staged(const Module& model) { return dynamic_cast<const HoldsStages*>(&model) != nullptr; }

// Returns the parts of units and pipelines in a model, those of the outermost ones alone, which
// tell of the inner ones.
void add_parts_in(const Module& module, Parts& parts) {
  Parts found;
  if (const auto* sharded = dynamic_cast<const ShardedModule*>(&module)) {
    found = sharded->gradients();
  } else if (const auto* pipeline = dynamic_cast<const PipelineModule*>(&module)) {
    found = pipeline->gradients();
  } else {
    for (const auto& child : module.children()) add_parts_in(*child, parts);
  }
  std::move(found.begin(), found.end(), std::back_inserter(parts));
}

Parts parts_in(const Module& module) {
  Parts parts;
  add_parts_in(module, parts);
  return parts;
}

// Returns the core of a sharded optimizer that has a parameter, and its number there.
std::pair<std::shared_ptr<Zero>, int64_t> core_of(const at::Tensor& parameter) {
  const auto cores = ZeroCores::of(parameter);
  if (!cores) return {nullptr, 0};
  for (const auto& core : cores->all()) {
    const auto& its = core->parameters();
    for (size_t i = 0; i < its.size(); ++i)
      if (its[i].is_same(parameter)) return {core, static_cast<int64_t>(i)};
  }
  return {nullptr, 0};
}

// Moves gradients of a part that a layer has to that layer's parts.
void deal_out(const GradNormPart& part, LayerOf& layer_of, std::vector<Parts>& found) {
  std::unordered_map<size_t, GradNormPart> dealt;
  for (const at::Tensor& gradient : part.gradients) {
    const auto layer = layer_of.find(gradient.unsafeGetTensorImpl());
    if (layer == layer_of.end()) continue;
    const GradNormPart empty{{}, part.device, part.sharded_over, part.copies, {}, part.stages};
    dealt.try_emplace(layer->second, empty).first->second.gradients.push_back(gradient);
    layer_of.erase(layer);
  }
  for (const at::Tensor& gradient : part.counted_elsewhere)
    layer_of.erase(gradient.unsafeGetTensorImpl());
  for (auto& [layer, own] : dealt) found[layer].push_back(std::move(own));
}

std::unordered_set<const at::TensorImpl*> stepped_by(const torch::optim::Optimizer& optimizer) {
  std::unordered_set<const at::TensorImpl*> found;
  for (const auto& group : optimizer.param_groups())
    for (const at::Tensor& parameter : group.params())
      found.insert(parameter.unsafeGetTensorImpl());
  return found;
}

int64_t numel_of(const Module& module) {
  int64_t numel = 0;
  for (const at::Tensor& parameter : module.parameters()) numel += parameter.numel();
  return numel;
}

// Returns the names of a list's layers, those without parameters beside the ones in front.
std::vector<FreezeLayer> layers_of(const Module& list, const std::string& prefix) {
  std::vector<FreezeLayer> layers;
  std::vector<std::string> waiting;  // in front of the first one that has parameters
  for (const auto& child : list.named_children()) {
    const std::string name = prefix + child.key();
    const bool has_parameters = !child.value()->parameters().empty();
    if (!has_parameters && layers.empty()) {
      waiting.push_back(name);
    } else if (!has_parameters) {
      layers.back().names.push_back(name);
    } else {
      FreezeLayer layer(name);
      layer.names.insert(layer.names.begin(), waiting.begin(), waiting.end());
      waiting.clear();
      layers.push_back(std::move(layer));
    }
  }
  return layers;
}

}  // namespace

FreezeLayer::FreezeLayer(std::initializer_list<FreezeLayer> together) {
  for (const FreezeLayer& one : together) {
    names.insert(names.end(), one.names.begin(), one.names.end());
    modules.insert(modules.end(), one.modules.begin(), one.modules.end());
  }
}

FrozenLayers::FrozenLayers(std::shared_ptr<Module> model, const std::vector<FreezeLayer>& layers,
                           torch::optim::Optimizer* optimizer, bool evaluates)
    : model_(std::move(model)),
      inner_(&unwrapped(*model_)),
      optimizer_(optimizer),
      evaluates_(evaluates),
      ranks_(ranks_of(*model_)) {
  for (const FreezeLayer& layer : layers.empty() ? all_layers() : layers) add(layer);
  check_nesting();
  check_found();
  check_shared();
  check_optimizer();
}

std::shared_ptr<Communicator> FrozenLayers::ranks_of(Module& model) {
  std::shared_ptr<Communicator> found;
  const auto take = [&found](const std::shared_ptr<Communicator>& ranks) {
    if (ranks && (!found || ranks->world() > found->world())) found = ranks;
  };
  for (const auto& module : model.modules()) {
    if (auto* averaging = dynamic_cast<AveragesGradients*>(module.get()))
      take(averaging->averages_over());
    if (const auto* stages = dynamic_cast<const HoldsStages*>(module.get()))
      take(stages->stage_ranks());
  }
  for (const GradNormPart& part : parts_in(model)) {
    take(part.sharded_over);
    take(part.stages);
  }
  for (const at::Tensor& parameter : model.parameters())
    if (const auto core = core_of(parameter).first) take(core->communicator());
  return found;
}

void FrozenLayers::refuse(const std::string& got, const std::string& next_step) const {
  C10_THROW_ERROR(ValueError,
                  error_text("freeze", got, ranks_ ? ranks_->rank_of() : RankOf{}, next_step));
}

// The list of modules that has most parameters.
std::vector<FreezeLayer> FrozenLayers::all_layers() const {
  if (dynamic_cast<const torch::nn::SequentialImpl*>(inner_) != nullptr)
    return layers_of(*inner_, "");
  std::vector<FreezeLayer> found;
  int64_t most = 0;
  for (const auto& item : inner_->named_modules("", /*include_self=*/false)) {
    const Module& list = *item.value();
    const bool is_list = dynamic_cast<const torch::nn::SequentialImpl*>(&list) != nullptr ||
                         dynamic_cast<const torch::nn::ModuleListImpl*>(&list) != nullptr;
    if (!is_list || numel_of(list) <= most) continue;
    most = numel_of(list);
    found = layers_of(list, item.key() + ".");
  }
  if (found.empty())
    refuse("got a model without a Sequential or ModuleList of layers",
           "Name its layers, from the input on.");
  return found;
}

void FrozenLayers::add(const FreezeLayer& layer) {
  Layer made;
  const auto modules = inner_->named_modules("", /*include_self=*/false);
  const auto take = [&](const std::string& name, const std::shared_ptr<Module>& module) {
    made.name += (made.name.empty() ? "" : " + ") + name;
    made.prefixes.push_back(name + ".");
    if (!module) return;
    if (evaluates_ && is_in_unit(name, *module))
      refuse("got '" + name + "' in a unit of fully_shard, whose mode is that of the unit",
             "Make the layer a unit of its own, or pass eval_frozen=false.");
    made.modules.push_back(module);
  };
  for (const std::string& name : layer.names) {
    const std::shared_ptr<Module>* module = modules.find(name);
    if (module == nullptr && !is_staged(*inner_))
      refuse("got '" + name + "' as a layer, expected the name of a module in the model",
             "Use the names of the plain model's named_modules().");
    take(name, module == nullptr ? nullptr : *module);
  }
  for (const auto& given : layer.modules) {
    const auto found = std::find_if(modules.begin(), modules.end(),
                                    [&](const auto& item) { return item.value() == given; });
    if (found == modules.end())
      refuse("got a " + given->name() + " as a layer that is not in the model",
             "Name the layer. A unit of fully_shard has other modules than the plain model.");
    take(found->key(), given);
  }
  layers_.push_back(std::move(made));
}

// A unit shows stand-ins of the modules in it, which have no forward.
bool FrozenLayers::is_in_unit(const std::string& name, const Module& module) const {
  if (dynamic_cast<const ShardedModule*>(&module) != nullptr) return false;
  if (dynamic_cast<const ShardedModule*>(inner_) != nullptr) return true;
  const auto modules = inner_->named_modules("", /*include_self=*/false);
  return std::any_of(modules.begin(), modules.end(), [&name](const auto& item) {
    return name.rfind(item.key() + ".", 0) == 0 &&
           dynamic_cast<const ShardedModule*>(item.value().get()) != nullptr;
  });
}

std::vector<std::string> FrozenLayers::names() const {
  std::vector<std::string> names;
  for (const Layer& layer : layers_) names.push_back(layer.name);
  return names;
}

// Each name that it is registered by, for checks.
std::vector<FrozenLayers::Parameter> FrozenLayers::parameters() const {
  std::vector<Parameter> found;
  for (const auto& item : inner_->named_parameters()) {
    Parameter parameter{item.key(), item.value()};
    for (size_t layer = 0; layer < layers_.size(); ++layer)
      for (const std::string& prefix : layers_[layer].prefixes)
        if (parameter.name.rfind(prefix, 0) == 0) parameter.layer = static_cast<int64_t>(layer);
    found.push_back(std::move(parameter));
  }
  return found;
}

void FrozenLayers::check_nesting() const {
  std::vector<std::string> prefixes;
  for (const Layer& layer : layers_)
    prefixes.insert(prefixes.end(), layer.prefixes.begin(), layer.prefixes.end());
  for (size_t i = 0; i < prefixes.size(); ++i) {
    for (size_t j = 0; j < prefixes.size(); ++j) {
      if (i == j || prefixes[i].rfind(prefixes[j], 0) != 0) continue;
      const auto name_of = [&](size_t k) { return prefixes[k].substr(0, prefixes[k].size() - 1); };
      refuse("got '" + name_of(i) + "' as a layer, which lies in '" + name_of(j) + "'",
             "Name each module once.");
    }
  }
}

// A rank of a pipeline has its own layers only.
void FrozenLayers::check_found() const {
  std::set<std::string> found;
  std::string own;
  for (const Parameter& parameter : parameters()) {
    if (parameter.layer < 0) continue;
    const std::string& name = layers_[static_cast<size_t>(parameter.layer)].name;
    if (found.insert(name).second) own += name + "\n";
  }
  if (is_staged(*inner_) && ranks_) {
    for (const std::string& text : gather_texts(own, *ranks_, ranks_->device())) {
      std::istringstream lines(text);
      for (std::string line; std::getline(lines, line);) found.insert(line);
    }
  }
  for (const Layer& layer : layers_) {
    if (found.count(layer.name) == 0)
      refuse("got layer '" + layer.name + "' without parameters",
             "Put it in braces with the layer in front of it: they are frozen together.");
  }
}

void FrozenLayers::check_shared() const {
  std::unordered_map<const at::TensorImpl*, Parameter> seen;
  for (const Parameter& parameter : parameters()) {
    const auto [first, is_new] = seen.emplace(parameter.tensor.unsafeGetTensorImpl(), parameter);
    if (is_new || first->second.layer == parameter.layer || !parameter.tensor.requires_grad())
      continue;
    refuse("got parameter '" + first->second.name + "', which is '" + parameter.name +
               "' as well, expected no layer to share one with what is frozen at another time",
           "Put both into one layer, or leave them out.");
  }
}

void FrozenLayers::check_optimizer() const {
  if (optimizer_ == nullptr) return;
  const auto stepped = stepped_by(*optimizer_);
  for (const Parameter& parameter : parameters()) {
    const bool is_known = stepped.count(parameter.tensor.unsafeGetTensorImpl()) > 0;
    if (!is_known && parameter.layer >= 0 && parameter.tensor.requires_grad())
      refuse("got an optimizer without '" + parameter.name + "', expected that of the model",
             "Pass the optimizer that steps the layers.");
  }
}

std::vector<Parts> FrozenLayers::gradients(int64_t frozen) const {
  std::vector<Parts> found(layers_.size());
  LayerOf layer_of;
  std::vector<std::pair<size_t, at::Tensor>> whole;
  const Parts parts = parts_in(*inner_);
  for (const Parameter& parameter : parameters()) {
    if (parameter.layer < frozen) continue;
    const auto layer = static_cast<size_t>(parameter.layer);
    const auto [core, number] = core_of(parameter.tensor);
    if (core && core->gradients({}).sharded_over) {
      found[layer].push_back(core->gradients({number}));
    } else if (parameter.tensor.grad().defined()) {
      const at::Tensor& gradient = parameter.tensor.grad();
      if (layer_of.emplace(gradient.unsafeGetTensorImpl(), layer).second)
        whole.emplace_back(layer, gradient);
    }
  }
  for (const GradNormPart& part : parts) deal_out(part, layer_of, found);
  for (const auto& [layer, gradient] : whole) {
    if (layer_of.count(gradient.unsafeGetTensorImpl()) == 0) continue;
    GradNormPart part;
    part.device = gradient.device();
    part.gradients = {gradient};
    found[layer].push_back(std::move(part));
  }
  return found;
}

bool FrozenLayers::train_alone() const {
  const auto all = parameters();
  return std::none_of(all.begin(), all.end(), [](const Parameter& parameter) {
    return parameter.layer < 0 && parameter.tensor.requires_grad();
  });
}

void FrozenLayers::freeze(int64_t count) {
  for (const Parameter& parameter : parameters()) {
    if (parameter.layer < 0) continue;
    Layer& layer = layers_[static_cast<size_t>(parameter.layer)];
    at::Tensor tensor = parameter.tensor;
    if (parameter.layer < count) {
      if (!tensor.requires_grad()) continue;
      layer.frozen.insert(parameter.name);
      tensor.set_requires_grad(false);
      tensor.mutable_grad().reset();
      forget(tensor);
    } else if (layer.frozen.erase(parameter.name) > 0) {
      tensor.set_requires_grad(true);
    }
  }
}

void FrozenLayers::forget(const at::Tensor& parameter) const {
  if (optimizer_ == nullptr) return;
  auto* sharded = dynamic_cast<ZeroOptimizer*>(optimizer_);
  if (sharded == nullptr) {
    optimizer_->state().erase(parameter.unsafeGetTensorImpl());
    return;
  }
  const auto [core, number] = core_of(parameter);
  if (core)
    sharded->local().state().erase(
        core->shards()[static_cast<size_t>(number)].unsafeGetTensorImpl());
}

void FrozenLayers::set_training(int64_t first, int64_t last, bool on) {
  for (int64_t layer = first; layer < last; ++layer)
    for (const auto& module : layers_[static_cast<size_t>(layer)].modules) module->train(on);
}

std::string FrozenLayers::first_in_training(int64_t count) const {
  for (int64_t layer = 0; layer < count; ++layer)
    for (const auto& module : layers_[static_cast<size_t>(layer)].modules)
      if (module->is_training()) return layers_[static_cast<size_t>(layer)].name;
  return "";
}

}  // namespace trireme
