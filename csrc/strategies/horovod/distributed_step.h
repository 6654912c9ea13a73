#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/module/module_parameters.h>
#include <trireme/strategies/horovod/optimizer_gradients.h>
#include <trireme/strategies/horovod/session.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>

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

  OptimizerGradients& gradients() { return gradients_; }
  // Calls `inner` with a closure that reduces what it computes.
  at::Tensor run(const std::function<at::Tensor(Closure)>& inner, const Closure& closure);

 private:
  at::Tensor run_reducing(const std::function<at::Tensor(Closure)>& inner, const Closure& closure);
  at::Tensor run_combining(const std::function<at::Tensor(Closure)>& inner, const Closure& closure);

  std::vector<at::Tensor> parameters_;
  std::shared_ptr<Communicator> ranks_;
  bool combines_;  // what steps change, by Adasum
  OptimizerGradients gradients_;
};

}  // namespace trireme::horovod
