#pragma once

#include <trireme/saving/trained_module.h>
#include <trireme/strategies/local_sgd/outer_optimizer.h>
#include <trireme/strategies/local_sgd/rounds.h>
#include <trireme/strategies/local_sgd/rounds_checkpoint.h>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace trireme {

// The parameters of a C++ module, as rounds want them. Those are averaged that train, or that the
// optimizer steps.
class ModuleDoor final : public RoundDoor {
 public:
  // Throws ValueError, naming `parameters`, for an optimizer over others.
  explicit ModuleDoor(const TrainedModule& trained);

  // Returns the parameters; those that `sender_of` says another rank sends get no anchor.
  // `have_all`: each rank of the worker has all of each.
  std::vector<RoundParameter> make_parameters(const WorkerRanks& ranks);
  // Returns the bytes of whole parameters.
  std::vector<int64_t> bytes() const;
  // Returns the parameters of each module; throws ValueError, naming `fragments`, unless each
  // parameter is in one of them.
  std::vector<Fragment> fragments_of(
      const std::vector<std::shared_ptr<torch::nn::Module>>& modules) const;
  // Makes these step the anchors: one, or one per fragment; without any, one of its own. Throws
  // ValueError for optimizers over other parameters.
  void take_outer(const std::vector<torch::optim::Optimizer*>& optimizers,
                  const std::vector<Fragment>& fragments);
  // Returns the ranks that keep one model with this rank, by DistributedDataParallel; null if none
  // does.
  std::shared_ptr<Communicator> averages_over() const;
  // Returns whether every parameter is sharded.
  bool shards_all() const;

  std::vector<at::Tensor> values(const std::vector<size_t>& parameters) override;
  void write(const std::function<void()>& write) override;
  void step_outer(size_t fragment, const std::vector<size_t>& parameters,
                  const std::vector<at::Tensor>& gradients) override;

  const TrainedModule& trained() const { return trained_; }
  const std::vector<std::string>& names() const { return names_; }
  const std::vector<std::unique_ptr<OuterOptimizer>>& outer() const { return outer_; }
  // Returns this rank's part of each parameter.
  std::vector<RoundPart> parts() const;
  // Returns a parameter as it was given.
  const at::Tensor& tensor(size_t parameter) const { return tensors_[parameter]; }

 private:
  void check_optimizer() const;
  void check_outer(const torch::optim::Optimizer& optimizer,
                   const std::optional<Fragment>& fragment) const;

  TrainedModule trained_;
  const torch::nn::Module& plain_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> tensors_;
  std::vector<at::Tensor> anchors_;
  std::unique_ptr<torch::optim::Optimizer> own_outer_;
  std::vector<std::unique_ptr<OuterOptimizer>> outer_;
};

}  // namespace trireme
