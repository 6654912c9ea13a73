#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>
#include <trireme/optim/grad_norm.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace trireme {

// What is frozen at a time: one module of a model or several, by name, or themselves.
struct TRIREME_API FreezeLayer {
  // NOLINTBEGIN(google-explicit-constructor): a layer, however it is named
  FreezeLayer(const char* name) : names{name} {}
  FreezeLayer(std::string name) : names{std::move(name)} {}
  FreezeLayer(std::shared_ptr<torch::nn::Module> module) : modules{std::move(module)} {}
  template <typename Contained>
  FreezeLayer(const torch::nn::ModuleHolder<Contained>& module) : modules{module.ptr()} {}
  FreezeLayer(std::initializer_list<FreezeLayer> together);
  // NOLINTEND(google-explicit-constructor)

  std::vector<std::string> names = {};
  std::vector<std::shared_ptr<torch::nn::Module>> modules = {};
};

// The layers of a C++ model under whatever strategy: which parameters each has, what their
// gradients are on this rank, and how they are frozen. The part of Freeze that knows modules; it
// decides nothing.
class TRIREME_API FrozenLayers {
 public:
  // `evaluates`: whether modes of layers will be set. Throws ValueError; see Freeze. No collective,
  // but for a pipeline, whose ranks tell each other which layers they have.
  FrozenLayers(std::shared_ptr<torch::nn::Module> model, const std::vector<FreezeLayer>& layers,
               torch::optim::Optimizer* optimizer, bool evaluates);

  // Returns the ranks that train the model, null for one process.
  static std::shared_ptr<Communicator> ranks_of(torch::nn::Module& model);

  std::vector<std::string> names() const;
  // Returns what this rank has of the gradients of each layer behind the first `frozen` ones.
  std::vector<std::vector<GradNormPart>> gradients(int64_t frozen) const;
  // Returns whether the model trains nothing but layers, as far as this rank has it.
  bool train_alone() const;

  // Freezes the first `count` layers, and trains those that it had frozen before behind them.
  // Frozen ones lose their gradients, and their state in the optimizer.
  void freeze(int64_t count);
  // Puts the layers from `first` to `last`, not included, in training mode or in evaluation mode.
  void set_training(int64_t first, int64_t last, bool on);
  // Returns the name of a module in the first `count` layers that is in training mode, or "".
  std::string first_in_training(int64_t count) const;
  torch::nn::Module& model() const { return *model_; }

 private:
  struct Layer {
    std::string name;
    std::vector<std::string> prefixes;  // what names of its parameters begin with
    std::vector<std::shared_ptr<torch::nn::Module>> modules;
    std::set<std::string> frozen;  // the parameters that this has frozen
  };
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    int64_t layer = -1;  // none
  };

  void add(const FreezeLayer& layer);
  std::vector<FreezeLayer> all_layers() const;
  std::vector<Parameter> parameters() const;
  void check_nesting() const;
  void check_found() const;
  void check_shared() const;
  void check_optimizer() const;
  bool is_in_unit(const std::string& name, const torch::nn::Module& module) const;
  void forget(const at::Tensor& parameter) const;
  [[noreturn]] void refuse(const std::string& got, const std::string& next_step) const;

  std::shared_ptr<torch::nn::Module> model_;
  torch::nn::Module* inner_;  // what strategies wrap
  torch::optim::Optimizer* optimizer_;
  bool evaluates_;
  std::shared_ptr<Communicator> ranks_;
  std::vector<Layer> layers_;
};

}  // namespace trireme
