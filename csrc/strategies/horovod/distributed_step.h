#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/module/module_parameters.h>
#include <trireme/strategies/horovod/optimizer_gradients.h>
#include <trireme/strategies/horovod/session.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace trireme::horovod {

// The parameters of an optimizer, and their names in messages.
struct TRIREME_API OptimizerParameters {
  // NOLINTBEGIN(google-explicit-constructor): one parameter of the optimizer, whatever it is
  OptimizerParameters(const std::vector<at::Tensor>& parameters);
  OptimizerParameters(const std::vector<torch::optim::OptimizerParamGroup>& param_groups);
  OptimizerParameters(const torch::nn::Module& module);  // names are the module's
  template <typename Module>
  OptimizerParameters(const torch::nn::ModuleHolder<Module>& holder)
      : OptimizerParameters(*holder) {}
  // NOLINTEND(google-explicit-constructor)

  std::vector<torch::optim::OptimizerParamGroup> groups;
  NamedParameters named;  // parameters of all groups, in their order
};

struct DistributedOptimizerOptions {
  Op op = Op::kAverage;  // kAverage, kSum or kAdasum
  double gradient_predivide_factor = 1;
  int64_t backward_passes_per_step = 1;
  std::optional<at::ScalarType> compression = std::nullopt;  // at::kHalf or at::kBFloat16
  bool sparse_as_dense = false;
};

// What DistributedOptimizer<Inner> does around a step of `Inner`.
class TRIREME_API DistributedStep {
 public:
  using Closure = torch::optim::Optimizer::LossClosure;
  // Collective; throws what OptimizerGradients does, and ValueError for another op or dtype.
  DistributedStep(const NamedParameters& parameters, std::shared_ptr<Communicator> ranks,
                  const DistributedOptimizerOptions& options);

  OptimizerGradients& gradients() { return *gradients_; }
  void set_backward_passes_per_step(int64_t passes);
  // Throws c10::Error between a backward and its step, when no parameters may come.
  void check_adds_now() const;
  // Reduces gradients of these parameters, too: those of a group that the optimizer has now, the
  // last one of `groups`. Collective; throws as the constructor does.
  void add(const std::vector<at::Tensor>& parameters, size_t groups);
  // Throws c10::Error if the optimizer steps parameters that it has by other ways.
  void check_parameters(const std::vector<torch::optim::OptimizerParamGroup>& groups) const;
  // Calls `inner` with a closure that reduces what it computes.
  at::Tensor run(const std::function<at::Tensor(Closure)>& inner, const Closure& closure);

 private:
  at::Tensor run_reducing(const std::function<at::Tensor(Closure)>& inner, const Closure& closure);
  at::Tensor run_combining(const std::function<at::Tensor(Closure)>& inner, const Closure& closure);

  NamedParameters parameters_;
  std::shared_ptr<Communicator> ranks_;
  bool combines_;  // what steps change, by Adasum
  OptimizerGradientsOptions options_;
  std::unique_ptr<OptimizerGradients> gradients_;
};

}  // namespace trireme::horovod
