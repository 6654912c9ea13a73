#pragma once

#include <trireme/strategies/horovod/distributed_step.h>
#include <trireme/strategies/horovod/session.h>

#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

namespace trireme::horovod {

// Any optimizer but LBFGS, whose steps depend on each rank's loss.
template <typename Optimizer>
concept Distributable = std::derived_from<Optimizer, torch::optim::Optimizer> &&
                        !std::derived_from<Optimizer, torch::optim::LBFGS>;

// `Inner` with gradients that are reduced over the ranks while backward computes them: Horovod's
// optimizer, for C++.
//
//   namespace hvd = trireme::horovod;
//   hvd::init();
//   hvd::DistributedOptimizer<torch::optim::SGD> optimizer(net, torch::optim::SGDOptions(0.1));
//   hvd::broadcast_parameters(net);   // ranks start from rank 0's values
//   optimizer.zero_grad();
//   loss_of(net->forward(input)).backward();   // the last backward of a step reduces
//   optimizer.step();
//
// `parameters`: a list, parameter groups, or a module, whose names errors then tell; the same on
// all ranks. Construct it on every rank, in the same order; destroy it before hvd::shutdown().
// A backward more than backward_passes_per_step before a step throws c10::Error, and so does
// zero_grad() between a backward and its step. What else it throws and costs:
// optimizer_gradients.h.
template <Distributable Inner>
class DistributedOptimizer final : public Inner {
 public:
  using Closure = DistributedStep::Closure;

  template <std::derived_from<torch::optim::OptimizerOptions> Options>
  DistributedOptimizer(const OptimizerParameters& parameters, Options defaults,
                       const DistributedOptimizerOptions& options = {})
      : DistributedOptimizer(parameters, std::move(defaults), session().gradients(), options) {}

  // Over the ranks of a communicator that nobody else uses.
  template <std::derived_from<torch::optim::OptimizerOptions> Options>
  DistributedOptimizer(const OptimizerParameters& parameters, Options defaults,
                       std::shared_ptr<Communicator> ranks,
                       const DistributedOptimizerOptions& options = {})
      : Inner(parameters.groups, std::move(defaults)),
        distributed_(parameters.named, std::move(ranks), options) {}

  // Synchronizes, and makes a step of `Inner`. Gradients that `closure` computes are reduced, too.
  at::Tensor step(Closure closure = nullptr) override {
    distributed_.check_parameters(this->param_groups());
    return distributed_.run([this](Closure inner) { return Inner::step(std::move(inner)); },
                            closure);
  }
  // These two hide torch's. add_param_group() is collective; called through torch's class it makes
  // the next step throw.
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group) {
    distributed_.check_adds_now();
    Inner::add_param_group(param_group);
    distributed_.add(param_group.params(), this->param_groups().size());
  }
  void zero_grad(bool set_to_none = true) {
    distributed_.gradients().check_zero_grad();
    Inner::zero_grad(set_to_none);
  }

  // Brings every .grad to its reduced value, if backward has not done so already.
  void synchronize() { distributed_.gradients().synchronize(); }
  void set_backward_passes_per_step(int64_t passes) {
    distributed_.set_backward_passes_per_step(passes);
  }

  // While the guard lives steps do not synchronize: synchronize() was called before.
  class SkipSynchronize {
   public:
    explicit SkipSynchronize(DistributedStep& distributed) : distributed_(distributed) {
      distributed_.gradients().set_steps_synchronize(false);
    }
    ~SkipSynchronize() { distributed_.gradients().set_steps_synchronize(true); }
    SkipSynchronize(const SkipSynchronize&) = delete;
    SkipSynchronize& operator=(const SkipSynchronize&) = delete;

   private:
    DistributedStep& distributed_;
  };
  [[nodiscard]] SkipSynchronize skip_synchronize() { return SkipSynchronize(distributed_); }

 private:
  DistributedStep distributed_;
};

}  // namespace trireme::horovod
