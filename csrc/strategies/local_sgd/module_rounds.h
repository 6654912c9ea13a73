#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>
#include <trireme/grad/codes/compression.h>
#include <trireme/saving/held_rounds.h>
#include <trireme/strategies/local_sgd/round_options.h>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace trireme {

class ModuleDoor;
class Rounds;

struct LocalSGDOptions {
  int64_t sync_every = 0;    // steps between two averages
  int64_t warmup_steps = 0;  // the first steps, after each of which workers average
  // The ranks that hold the same elements on different workers. Null: the ranks that have this
  // one's place on other hosts, if hosts have as many ranks each and DistributedDataParallel, ZeRO
  // or fully_shard keeps the ranks of a host equal.
  std::shared_ptr<Communicator> across = nullptr;
  std::optional<Compression> compression = {};
};

struct DiLoCoOptions {
  int64_t sync_every = 0;
  int64_t fragments = 1;  // by bytes, of parameters in their order
  int64_t fragment_sync_delay = 0;
  double fragment_update_alpha = 0;
  // Over parameters of the module: none for SGD (0.7, Nesterov 0.9); one; or one per fragment.
  // Until the rounds are gone they step the anchors in place of the parameters.
  std::vector<torch::optim::Optimizer*> outer_optimizers = {};
  // Modules whose parameters make up a fragment each, in place of `fragments`.
  std::vector<std::shared_ptr<torch::nn::Module>> fragment_modules = {};
  std::shared_ptr<Communicator> across = nullptr;  // as of LocalSGDOptions
  std::optional<Compression> compression = {};
};

// What LocalSGD and DiLoCo have in common; see [Note: rounds] in round_options.h.
//
//   trireme::DiLoCo rounds(*net, optimizer, {.sync_every = 50, .fragments = 5,
//                                            .fragment_sync_delay = 5});
//   ...
//   rounds.step();  // in place of optimizer.step()
//
// `module` may be in DistributedDataParallel, or Sharded; the optimizer, over parameters of it, may
// be a ZeroRedundancyOptimizer. Construct it on every rank of all workers; module and optimizers
// must outlive it. Buffers and parameters of integers stay as they are. Memory: a copy of the
// parameters, the state of the outer optimizer, and a fragment in fp32 while it is averaged.
//
// Throws ValueError, naming the argument, for bad options, an optimizer over other parameters, and,
// on all ranks alike, where these have other options.
class TRIREME_API ModuleRounds : public HoldsRounds {
 public:
  ModuleRounds(const ModuleRounds&) = delete;
  ModuleRounds& operator=(const ModuleRounds&) = delete;
  ~ModuleRounds() override;

  // Makes a step of the optimizer, and of the rounds. The first one begins: workers go on from the
  // parameters of the first worker. Collective over all workers where a fragment leaves or is
  // applied. Throws what the optimizer throws, which ends the rounds on all workers, and
  // c10::DistBackendError if another worker has failed. A round that fails has written no
  // parameter.
  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr);
  // Sets the share of this worker, on all its ranks, in the next average alone. 0: it counts for
  // nothing; if all workers have 0, nothing moves.
  void set_weight(double weight);

  // For save_checkpoint() and load_checkpoint(), which are given these rounds.
  void add_to(CheckpointContent& content, const TrainedModule& trained,
              const CheckpointRanks& ranks) override;
  void load(const CheckpointSource& source, const TrainedModule& trained,
            const CheckpointRanks& ranks) override;

  Rounds& core() const { return *rounds_; }

 protected:
  struct Request {
    RoundOptions options;
    std::vector<torch::optim::Optimizer*> outer_optimizers = {};
    std::vector<std::shared_ptr<torch::nn::Module>> fragment_modules = {};
    std::shared_ptr<Communicator> across = nullptr;
  };
  ModuleRounds(torch::nn::Module& module, torch::optim::Optimizer& optimizer, Request request);

 private:
  void check_same_optimizer(const TrainedModule& trained) const;

  torch::optim::Optimizer& optimizer_;
  int exceptions_before_;
  bool is_begun_ = false;
  std::shared_ptr<ModuleDoor> door_;
  std::unique_ptr<Rounds> rounds_;
};

// Averages parameters after every `sync_every`-th step.
class TRIREME_API LocalSGD final : public ModuleRounds {
 public:
  LocalSGD(torch::nn::Module& module, torch::optim::Optimizer& optimizer,
           const LocalSGDOptions& options);
};

// DiLoCo (Douillard et al. 2023), in fragments that travel while training goes on (Streaming
// DiLoCo, Douillard et al. 2025).
class TRIREME_API DiLoCo final : public ModuleRounds {
 public:
  DiLoCo(torch::nn::Module& module, torch::optim::Optimizer& optimizer,
         const DiLoCoOptions& options);
};

}  // namespace trireme
