#pragma once

#include <trireme/comm/launch/launch.h>
#include <trireme/optim/flat_optimizer.h>
#include <trireme/strategies/zero/zero_optimizer.h>

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <concepts>
#include <memory>
#include <utility>
#include <vector>

namespace trireme {

// Any optimizer but LBFGS, which needs all parameters at once and calls its closure while it
// writes.
template <typename Optimizer>
concept Shardable = std::derived_from<Optimizer, torch::optim::Optimizer> &&
                    !std::derived_from<Optimizer, torch::optim::LBFGS>;

// Whether each element is treated by itself, so that a slice of a parameter is as good as all of
// it.
template <typename Optimizer>
inline constexpr bool kIsElementwise =
    (std::same_as<Optimizer, torch::optim::Adagrad> ||
     std::same_as<Optimizer, torch::optim::Adam> || std::same_as<Optimizer, torch::optim::AdamW> ||
     std::same_as<Optimizer, torch::optim::RMSprop> || std::same_as<Optimizer, torch::optim::SGD> ||
     std::same_as<Optimizer, optim::Adam> || std::same_as<Optimizer, optim::AdamW> ||
     std::same_as<Optimizer, optim::SGD>);

// Optimizer state, and with stage 2 gradients, sharded over the ranks:
// torch.distributed.optim.ZeroRedundancyOptimizer for C++, which LibTorch has not.
//
//   trireme::Context ctx = trireme::init();
//   trireme::ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer(
//       net->parameters(), torch::optim::AdamWOptions(1e-3), trireme::ZeroOptions{.stage = 2});
//   optimizer.zero_grad();
//   loss_of(net->forward(input)).backward();   // stage 2 averages here: net is not under DDP
//   optimizer.clip_grad_norm_(1.0);
//   optimizer.step();                          // collective; afterwards every parameter is whole
//
// `parameters`: a list, parameter groups, or a module, whose names errors then tell; the same on
// all ranks. Ranks start from rank 0's values. `Inner` is constructed with groups of this
// rank's shards and the same options: slices of every parameter for optimizers that are known to
// treat elements alike, whole parameters for others (yours), balanced by bytes;
// ZeroOptions::placement decides otherwise.
//
// It is a torch::optim::Optimizer: learning-rate schedulers change its groups, torch::save (after
// consolidate()) and torch::load exchange its state with the plain `Inner`. With stage 1
// DistributedDataParallel averages gradients. With stage 2 a .grad has its full shape but holds
// this rank's shards of the average and zeros elsewhere; what changes it otherwise than
// clip_grad_norm_() makes step() throw. ZeroOptions::fused_step takes trireme::optim::Adam or AdamW
// as `Inner`; use the optimizer's zero_grad() with it, which forgets what was not stepped with.
//
// Construct it on every rank, in the same order; destroy it before the Context shuts down. Where
// ranks share the parameters' memory they do so after the optimizer is gone: clone them before
// anything else than another sharded optimizer steps them. What else it costs, throws and
// guarantees: zero_optimizer.h, zero.h.
template <Shardable Inner>
class ZeroRedundancyOptimizer final : public ZeroOptimizer {
 public:
  // Steps over the group of the Context that trireme::init() returned last.
  template <std::derived_from<torch::optim::OptimizerOptions> Options>
  ZeroRedundancyOptimizer(ZeroParameters parameters, Options defaults,
                          const ZeroOptions& options = {})
      : ZeroRedundancyOptimizer(std::move(parameters), std::move(defaults), current_communicator(),
                                options) {}

  template <std::derived_from<torch::optim::OptimizerOptions> Options>
  ZeroRedundancyOptimizer(ZeroParameters parameters, Options defaults,
                          std::shared_ptr<Communicator> communicator,
                          const ZeroOptions& options = {})
      : ZeroOptimizer(std::move(parameters),
                      {std::make_unique<Options>(defaults), make_local_with(defaults), count_step(),
                       std::move(communicator), with_placement(options)}) {}

 private:
  template <typename Options>
  static MakeLocal make_local_with(const Options& defaults) {
    return [defaults](const std::vector<torch::optim::OptimizerParamGroup>& groups) {
      return std::make_unique<Inner>(groups, defaults);
    };
  }
  static CountStep count_step() {
    if constexpr (std::same_as<Inner, optim::Adam> || std::same_as<Inner, optim::AdamW>) {
      return
          [](torch::optim::Optimizer& local, size_t group, const std::vector<at::Tensor>& shards) {
            return static_cast<Inner&>(local).count_step(local.param_groups()[group], shards);
          };
    } else {
      return nullptr;
    }
  }
  static ZeroOptions with_placement(ZeroOptions options) {
    if (!options.placement)
      options.placement = kIsElementwise<Inner> ? ShardPlacement::kDim0 : ShardPlacement::kWhole;
    return options;
  }
};

}  // namespace trireme
