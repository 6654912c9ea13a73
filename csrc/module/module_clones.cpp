#include <trireme/module/module_clones.h>

#include <trireme/common/error.h>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

namespace trireme {
namespace {

using torch::nn::Module;
using Modules = std::vector<std::shared_ptr<Module>>;

[[noreturn]] void refuse_clone(const std::string& what) {
  C10_THROW_ERROR(ValueError, error_text("data_parallel",
                                         "got a clone " + what + ", expected one like its module",
                                         {}, "Let reset() register what the module has."));
}

// Hides the weights that embeddings were made of, Embedding::from_pretrained()'s too, as long as it
// lives: reset() of a clone would register them as its own, so that all clones had one tensor.
class HiddenWeights {
 public:
  explicit HiddenWeights(const Module& module) {
    for (const std::shared_ptr<Module>& one : module.modules()) {
      hide<torch::nn::EmbeddingImpl>(*one);
      hide<torch::nn::EmbeddingBagImpl>(*one);
    }
  }
  ~HiddenWeights() {
    for (auto& [place, weight] : hidden_) *place = std::move(weight);
  }
  HiddenWeights(const HiddenWeights&) = delete;
  HiddenWeights& operator=(const HiddenWeights&) = delete;

 private:
  template <typename Impl>
  void hide(Module& module) {
    auto* embedding = dynamic_cast<Impl*>(&module);
    if (embedding == nullptr || !embedding->options._weight().defined()) return;
    at::Tensor& place = embedding->options._weight();
    hidden_.emplace_back(&place, std::exchange(place, at::Tensor()));
  }

  std::vector<std::pair<at::Tensor*, at::Tensor>> hidden_;
};

std::shared_ptr<Module> cloned(const Module& module, c10::Device device) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const auto drawn = [&] {
    const std::lock_guard lock(generator.mutex());
    return generator.get_state();
  }();
  const auto put_back = c10::make_scope_exit([&] {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(drawn);
  });
  const HiddenWeights hidden(module);
  try {
    std::shared_ptr<Module> clone = module.clone(device);
    // An inner module that cannot be cloned was made by reset(), on the CPU.
    if (clone != nullptr) clone->to(device);
    return clone;
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& error) {
    C10_THROW_ERROR(
        NotImplementedError,
        error_text("data_parallel",
                   std::string("got a module that cannot be cloned (") +
                       error.what_without_backtrace() + "), expected one that can",
                   {},
                   "Derive it from torch::nn::Cloneable, and register parameters, buffers and "
                   "modules in reset()."));
  }
}

// Walks through a module and its clones side by side.
class TwinWalk {
 public:
  explicit TwinWalk(ModuleClones& clones) : clones_(clones) {}

  void visit(const std::string& prefix, const std::shared_ptr<const Module>& module,
             const Modules& copies) {
    const Module& original = *module;
    for (const std::shared_ptr<Module>& copy : copies) {
      const Module* twin = copy.get();
      if (twin == nullptr || typeid(*twin) != typeid(original))
        refuse_clone(std::string("of another type for '") + prefix + original.name() + "'");
    }
    clones_.twins.emplace_back(module, copies);
    for (const auto& item : module->named_parameters(/*recurse=*/false))
      add(prefix + item.key(), item.value(), tensors_of(copies, item.key(), true), true);
    for (const auto& item : module->named_buffers(/*recurse=*/false))
      add(prefix + item.key(), item.value(), tensors_of(copies, item.key(), false), false);
    const auto children = module->named_children();
    for (size_t i = 0; i < children.size(); ++i)
      visit(prefix + children[i].key() + ".", children[i].value(),
            children_of(copies, children[i].key(), i));
  }

 private:
  static std::vector<at::Tensor> tensors_of(const Modules& copies, const std::string& name,
                                            bool parameters) {
    std::vector<at::Tensor> tensors;
    for (const std::shared_ptr<Module>& copy : copies) {
      const auto named = parameters ? copy->named_parameters(/*recurse=*/false)
                                    : copy->named_buffers(/*recurse=*/false);
      const at::Tensor* found = named.find(name);
      if (found == nullptr) refuse_clone(std::string("without '") + name + "'");
      tensors.push_back(*found);
    }
    return tensors;
  }

  static Modules children_of(const Modules& copies, const std::string& name, size_t i) {
    Modules twins;
    for (const std::shared_ptr<Module>& copy : copies) {
      const auto children = copy->named_children();
      // Older torch gives the children of a cloned Sequential numbers for names.
      const bool by_place = dynamic_cast<const torch::nn::SequentialImpl*>(copy.get()) != nullptr;
      const std::shared_ptr<Module>* found = children.find(name);
      if (by_place ? i >= children.size() : found == nullptr)
        refuse_clone(std::string("without '") + name + "'");
      twins.push_back(by_place ? children[i].value() : *found);
    }
    return twins;
  }

  void add(const std::string& name, const at::Tensor& original,
           const std::vector<at::Tensor>& twins, bool parameter) {
    const auto [seen, is_first] =
        seen_.emplace(twins.front().unsafeGetTensorImpl(), original.unsafeGetTensorImpl());
    if (!is_first) {
      if (seen->second != original.unsafeGetTensorImpl())
        refuse_clone(std::string("that ties '") + name + "' to another parameter");
      return;
    }
    ModuleReplicas& tensors = clones_.tensors;
    const bool leaf = parameter || original.requires_grad();
    const auto is_shared = [&](const at::Tensor& twin) { return twin.is_same(original); };
    if (leaf && std::any_of(twins.begin(), twins.end(), is_shared))
      refuse_clone(std::string("that has the very '") + name + "' of its module");
    if (leaf) tensors.names.push_back(name);
    (leaf ? tensors.parameters : tensors.buffers).push_back(original);
    for (size_t i = 0; i < twins.size(); ++i)
      (leaf ? tensors.leaves : tensors.replica_buffers)[i].push_back(twins[i]);
  }

  ModuleClones& clones_;
  std::map<const at::TensorImpl*, const at::TensorImpl*> seen_;  // clone 0's, to their originals
};

}  // namespace

ModuleClones clone_module(const Module& module, const std::vector<c10::Device>& devices) {
  ModuleClones clones;
  const c10::InferenceMode no_inference(false);  // clones outlive it
  for (const c10::Device device : devices) clones.modules.push_back(cloned(module, device));
  clones.tensors.devices = devices;
  clones.tensors.leaves.resize(devices.size());
  clones.tensors.replica_buffers.resize(devices.size());
  TwinWalk(clones).visit("", module.shared_from_this(), clones.modules);
  return clones;
}

void follow_training(const ModuleClones& clones) {
  for (const auto& [module, copies] : clones.twins)
    for (const std::shared_ptr<Module>& copy : copies)
      if (copy->is_training() != module->is_training()) copy->train(module->is_training());
}

void connect(ModuleClones& clones) {
  ModuleReplicas& tensors = clones.tensors;
  for (size_t replica = 0; replica < tensors.devices.size(); ++replica) {
    for (size_t i = 0; i < tensors.parameters.size(); ++i) {
      const at::Tensor& parameter = tensors.parameters[i];
      at::Tensor& leaf = tensors.leaves[replica][i];
      const bool here = leaf.device() == parameter.device();
      // An alias also passes sparse gradients on, unlike a view.
      const at::Tensor value = here ? at::alias(parameter) : parameter.to(leaf.device());
      leaf.set_requires_grad(false);
      if (here) {
        share_tensor(parameter, leaf);
      } else {
        leaf.set_data(value.detach());
      }
      if (value.requires_grad())
        torch::autograd::impl::set_gradient_edge(leaf, torch::autograd::impl::gradient_edge(value));
    }
  }
  for (size_t replica = 0; replica < tensors.devices.size(); ++replica) {
    for (size_t i = 0; i < tensors.buffers.size(); ++i) {
      const at::Tensor& buffer = tensors.buffers[i];
      at::Tensor& copy = tensors.replica_buffers[replica][i];
      if (replica == 0 && buffer.device() == copy.device()) {
        share_tensor(buffer, copy);
      } else {
        copy.set_data(buffer.detach().to(copy.device(), /*non_blocking=*/true, /*copy=*/true));
      }
    }
  }
}

}  // namespace trireme
