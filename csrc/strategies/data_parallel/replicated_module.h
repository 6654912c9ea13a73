#pragma once

#include <trireme/common/export.h>
#include <trireme/common/fork_guard.h>
#include <trireme/common/worker_pool.h>
#include <trireme/module/module_clones.h>
#include <trireme/strategies/data_parallel/replica_pass.h>
#include <trireme/strategies/data_parallel/replicas.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace trireme {

struct DataParallelOptions {
  // One device per replica, the module's own first; one may be named twice. If empty, `replicas`
  // times the module's own.
  std::vector<c10::Device> devices = {};
  // The number of replicas; 0: as many as devices or weights, or, with neither, as suit the CPUs
  // (core_groups.h) for a module there, and 1 elsewhere.
  int64_t replicas = 0;
  // The device where outputs are put together; the first device if absent.
  std::optional<c10::Device> output_device = {};
  // The batch dimension of inputs and outputs; from the end if negative.
  int64_t dim = 0;
  // The shares of the batch, one per replica; all the same if empty.
  std::vector<double> weights = {};
  // Whether shares follow the measured speed of the replicas.
  bool auto_balance = false;
};

// The part of DataParallel that does not depend on the type of its module; see data_parallel.h.
// Forwards of several threads come one after the other; no other call may come during one.
class TRIREME_API ReplicatedModule : public torch::nn::Module {
 public:
  ReplicatedModule(const ReplicatedModule&) = delete;
  ReplicatedModule& operator=(const ReplicatedModule&) = delete;

  // Makes the replicas and their threads anew: after a change of anything but a tensor in the
  // module (a dropout's p), of what is registered in it, or of at::get_num_threads(). Values,
  // dtypes, requires_grad, train() and eval(), and a module that was moved are followed anyway.
  void replicate();

  // Returns the report of the last step; all 0 for a single replica, which is the module itself.
  ReplicasReport last_step() const;
  // Returns the devices of the replicas.
  const std::vector<c10::Device>& devices() const { return devices_; }

 protected:
  // Throws ValueError for options that contradict each other or the module, and for a
  // ReplicatedModule in it.
  ReplicatedModule(std::shared_ptr<torch::nn::Module> module, DataParallelOptions options);

  const DataParallelOptions& options() const { return options_; }
  c10::Device output_device() const { return options_.output_device.value_or(devices_.front()); }

  // Waits for the forwards of other threads. Throws ValueError in a replica of this module.
  [[nodiscard]] std::unique_lock<std::mutex> take_turn();
  // Makes the replicas follow the module before a forward. Returns whether there is one replica
  // only.
  bool get_ready();
  // Returns the rows of the batch whose first tensor is `first`; one if there is none.
  int64_t rows_of(const at::Tensor* first) const;
  std::shared_ptr<ReplicaPass> begin(int64_t rows);
  torch::nn::Module& replica(const ReplicaPass& pass, size_t position) const;
  Replicas& replicas() const { return *replicas_; }
  // Returns the mean of 0-dim losses, one per chunk, weighted by their rows.
  at::Tensor mean_loss(ReplicaPass& pass, std::vector<std::vector<at::Tensor>> losses) const;
  std::shared_ptr<torch::nn::Module> clone_of_module(
      const std::optional<c10::Device>& device) const;

 private:
  void choose_devices();

  std::shared_ptr<torch::nn::Module> inner_;
  DataParallelOptions options_;
  std::vector<c10::Device> devices_;
  at::Tensor probe_;     // a tensor of the module: tells whether it was moved
  ModuleClones clones_;  // without their tensors, which replicas_ has
  std::shared_ptr<WorkerPool> pool_;
  std::atomic<const void*> pool_id_ = nullptr;
  std::shared_ptr<Replicas> replicas_;
  std::mutex turn_;  // held by a forward
  ForkGuard fork_guard_;
};

// Returns `device` with the index it stands for. Throws ValueError if this machine has none.
TRIREME_API c10::Device existing_device(c10::Device device);

}  // namespace trireme
