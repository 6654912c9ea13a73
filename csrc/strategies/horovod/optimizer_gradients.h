#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/grad/grad_reducer.h>
#include <trireme/strategies/horovod/pass_delivery.h>

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace trireme::horovod {

// [Note: gradients of an optimizer]
//
// A DistributedOptimizer sees parameters, no module. So hooks on these decide which backward
// synchronizes: the one that brings a parameter the last of its backward_passes_per_step gradients.
// Backwards before only accumulate. So all gradients are reduced when the last backward of a step
// returns, and synchronize() has something to do after fewer passes only: it takes part in what is
// a backward on other ranks. Passes are counted by parameter, as backwards of one step may reach
// different ones.

// What gradients of ranks become.
enum class GradientOp : uint8_t {
  kAverage,
  kSum,
  kNone,  // themselves: passes are counted, and nothing is sent (Adasum combines what steps change)
};

struct OptimizerGradientsOptions {
  GradientOp op = GradientOp::kAverage;
  // Gradients are divided by it before they are summed up, and the sums multiplied by it over the
  // number of ranks; by default they are divided by the number of ranks before.
  double predivide_factor = 1;
  int64_t backward_passes_per_step = 1;
  // The dtype in which floating-point gradients travel; their own if absent.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;
  bool sparse_as_dense = false;  // sparse gradients travel as dense ones, and are sparse again
  // Throw for a mistake in the order of calls, c10::Error unless told otherwise, and in place of a
  // c10::DistBackendError.
  Refuse refuse = {};
  std::function<void(const std::string&)> failed = {};
};

// The gradients of a DistributedOptimizer. Both front doors wrap it, and step.
//
// Cost per step: that of GradReducer, which is DDP's. The training thread calls the functions,
// without the GIL. They throw what `refuse` and `failed` do, and c10::ValueError after end().
class TRIREME_API OptimizerGradients {
 public:
  // All parameters of the optimizer, the same on all ranks, with names that differ. Collective.
  // Throws ValueError for bad options, and on all ranks where these, or the parameters, differ.
  OptimizerGradients(const NamedParameters& parameters, std::shared_ptr<Communicator> communicator,
                     OptimizerGradientsOptions options);
  ~OptimizerGradients();
  OptimizerGradients(const OptimizerGradients&) = delete;
  OptimizerGradients& operator=(const OptimizerGradients&) = delete;

  // Brings every .grad to its reduced value. Collective where a backward has not done so, and where
  // nothing came since the last call: every .grad is reduced again then.
  void synchronize();
  // Called before the optimizer steps: synchronizes, unless it steps inside skip_synchronize().
  void begin_step();
  // Returns the warning of a step that reduces again what synchronize() has reduced.
  std::optional<std::string> warning_of_step() const;
  // Sets whether steps synchronize.
  void set_steps_synchronize(bool synchronize) { steps_synchronize_ = synchronize; }
  // Refuses gradients to be dropped that no step has used.
  void check_zero_grad() const;
  void set_backward_passes_per_step(int64_t passes);
  // Returns whether gradients came since the last synchronization.
  bool has_passes() const;
  // Forgets passes, and that synchronize() was called.
  void forget_passes();

  // Takes part in a backward of the others with zeros, leaving every .grad alone. Collective.
  void shadow_backward();
  // Sets a callback for a backward that synchronizes, called with its number before it waits for
  // anything, on the thread that runs it; none if it is empty. Any thread calls these two: whoever
  // sets the callback and then asks for the number misses no step.
  void set_begun_callback(std::function<void(int64_t step)> begun);
  // Returns the number of the last synchronized backward that began.
  int64_t last_step() const { return steps_begun_; }

  // Takes the hooks off the parameters: the group ends, for this reason. Not collective.
  void end(const std::string& why);

 private:
  class Counter;
  void make_reducer(NamedParameters parameters);
  void compare(const std::vector<ParameterInfo>& infos) const;
  int64_t agree_on_number(c10::Device device) const;
  void reduce(bool all);
  void step_begins();
  PassCounts& passes() const;
  std::unique_lock<std::recursive_mutex> lock() const;
  void check_alive() const;

  std::shared_ptr<Communicator> communicator_;
  RankOf where_;
  OptimizerGradientsOptions options_;
  std::shared_ptr<BackwardTrigger> trigger_;
  std::shared_ptr<PassDelivery> delivery_;
  std::shared_ptr<GradReducer> reducer_;
  std::unique_ptr<Counter> counter_;  // in place of a reducer, if nothing is reduced
  std::mutex begun_mutex_;
  std::function<void(int64_t)> begun_;
  std::atomic<int64_t> steps_begun_{0};
  bool steps_synchronize_ = true;
  bool was_synchronized_ = false;  // since the last step
  std::string ended_;
};

}  // namespace trireme::horovod
