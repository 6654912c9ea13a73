#include <trireme/module/module_parameters.h>

#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>

#include <unordered_set>
#include <utility>

namespace trireme {
namespace {

// The registered tensors in order, by address. A caller that compares keeps the tensors alive.
using Walk = std::vector<const at::TensorImpl*>;

// torch hands out copies of all names; protected members may be read through a subclass.
struct Registered : torch::nn::Module {
  static const torch::OrderedDict<std::string, at::Tensor>& of(const torch::nn::Module& module) {
    return module.*(&Registered::parameters_);
  }
};

void walk(const torch::nn::Module& module, Walk& found) {
  for (const auto& item : Registered::of(module)) {
    if (item.value().defined()) found.push_back(item.value().unsafeGetTensorImpl());
  }
  for (const auto& child : module.children()) walk(*child, found);
}

// A module as it was, and as it is.
struct Watched {
  explicit Watched(std::shared_ptr<torch::nn::Module> watched) : module(std::move(watched)) {
    walk(*module, known);
  }

  // Returns whether there are other tensors than before, regardless of their order and names.
  bool is_changed() {
    met.clear();
    walk(*module, met);
    if (met == known) return false;
    const std::unordered_set<const at::TensorImpl*> before(known.begin(), known.end());
    if (before == std::unordered_set<const at::TensorImpl*>(met.begin(), met.end())) known = met;
    return met != known;
  }

  std::shared_ptr<torch::nn::Module> module;
  Walk known;
  Walk met;
};

}  // namespace

NamedParameters named_parameters(const torch::nn::Module& module) {
  std::unordered_set<const at::TensorImpl*> sparse;
  const auto look_at = [&](const torch::nn::Module& layer) {
    if (const auto* embedding = layer.as<torch::nn::EmbeddingImpl>()) {
      if (embedding->options.sparse()) sparse.insert(embedding->weight.unsafeGetTensorImpl());
    } else if (const auto* bag = layer.as<torch::nn::EmbeddingBagImpl>()) {
      if (bag->options.sparse()) sparse.insert(bag->weight.unsafeGetTensorImpl());
    }
  };
  look_at(module);  // it may live on the stack, where torch cannot list it
  for (const auto& layer : module.modules(/*include_self=*/false)) look_at(*layer);
  NamedParameters parameters;
  std::unordered_set<const at::TensorImpl*> seen;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& parameter = item.value();
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    parameters.names.push_back(item.key());
    parameters.tensors.push_back(parameter);
    parameters.sparse_gradient.push_back(sparse.count(parameter.unsafeGetTensorImpl()) > 0);
  }
  return parameters;
}

ModuleWatch watch_parameters_of(std::shared_ptr<torch::nn::Module> module) {
  const auto watched = std::make_shared<Watched>(std::move(module));
  ModuleWatch watch;
  watch.look = [watched](bool /*thoroughly*/) -> std::optional<ModuleNow> {
    if (!watched->is_changed()) return std::nullopt;
    return ModuleNow{named_parameters(*watched->module), {}};
  };
  watch.adopted = [watched] { watched->known = watched->met; };
  return watch;
}

}  // namespace trireme
