#pragma once

#include <trireme/common/export.h>
#include <trireme/sync/deferred_sync.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace trireme {

// [Note: when a backward synchronizes]
//
// Nothing is decided in forward but one flag. after_forward() puts a gradient hook on the output
// tensors (no clone); the hook carries whether that forward synchronizes (no_sync() forwards do
// not). When a gradient reaches such an output, the backward that runs is armed: the end callback
// is queued into *its* graph task, which is the outer one even when checkpointing runs reentrant
// backwards inside. From then on each parameter's hook counts down its bucket; buckets are launched
// in plan order; the end callback launches the rest, waits, and delivers every gradient. So .grad
// is final when backward() returns, and 1F1B, several forwards per backward, and several backwards
// per forward need no care.
//
// autograd.grad() and backward(inputs=...) arm only if they accumulate into one of our parameters.
// A graph task that is destroyed before its end callback ran was left by an exception, which its
// peers are told.

using VisitedNodes =
    std::unordered_map<torch::autograd::Node*, torch::autograd::GraphTask::ExecInfo>;

// This rank's part in a synchronized backward: its gradients; or, while it has none (join), zeros,
// leaving every .grad alone or not.
enum class Part : uint8_t { kGradients, kZeros, kZerosThenStep };

// The steps of a synchronized backward. An BackwardTrigger decides when they run.
class BackwardSteps {
 public:
  virtual ~BackwardSteps() = default;
  // Called around every forward with gradients enabled.
  virtual void forward_begins() = 0;
  virtual void forward_ends() = 0;
  // Returns whether `leaf` is a parameter whose gradient is synchronized.
  virtual bool owns(const at::Tensor& leaf) const = 0;
  // Returns whether a backward restricted to these nodes accumulates into any of the parameters.
  virtual bool is_visited_by(const VisitedNodes& visited) const = 0;
  // Throws if the group, or the caller's parameters, cannot go on.
  virtual void look_around() = 0;
  virtual void begin_backward(Part part) = 0;
  // Called when autograd has finished.
  virtual void finish_backward() = 0;
  // Called when an exception has left the backward; `why` quotes it, or is empty.
  virtual void abandon_backward(const std::string& why) noexcept = 0;
  // Synchronizes accumulated gradients, without a backward.
  virtual void reduce_accumulated() = 0;
  virtual void announce_failure(const std::string& text) noexcept = 0;
};

// Decides which backwards synchronize, and holds the lock of all threads that work on one. A
// strategy reports its forwards to it.
//
// The training thread calls the functions of a strategy, without the GIL; hooks are called on
// autograd's threads.
class TRIREME_API BackwardTrigger : public DeferredSync,
                                    public std::enable_shared_from_this<BackwardTrigger> {
 public:
  // `at_parameters` makes every backward that accumulates into a parameter synchronize, unless
  // set_synchronize(false) was called: for callers that see no forward.
  explicit BackwardTrigger(bool at_parameters = false) : at_parameters_(at_parameters) {}

  // Called around every forward with gradients enabled. If `all_found` is false, further outputs
  // may hide in objects that the caller could not look into.
  void before_forward();
  void after_forward(const std::vector<at::Tensor>& outputs, bool synchronize,
                     bool all_found = true);
  // Makes the next backward that reaches an output or a parameter synchronize, whatever its forward
  // said; while it is held, unless the last forward, or the caller, asked for none.
  void prepare_for_backward() override;
  // Set whether backwards synchronize that were not prepared. `asked`, if there is one, decides
  // this as well, each time.
  void set_synchronize(bool synchronize);
  void ask_to_synchronize(std::function<bool()> asked);
  // Sets a callback for a backward that is found to synchronize, called before its first
  // collective, on the thread that runs it.
  void set_armed_callback(std::function<void()> callback);
  // Arms these together, in this order, whichever of them a backward reaches first. Ranks may get
  // gradients in different orders, or none (join), and still wait for each other in one order: the
  // first one's collectives go out while backward runs, the others', unless gradients stream, when
  // it ends. Keeps none of them alive.
  static void arm_together(const std::vector<std::shared_ptr<BackwardTrigger>>& siblings);

  // For a pipeline; see deferred_sync.h.
  void hold(bool held) override;
  bool is_held() const;
  void synchronize_unreached() override;
  void announce_failure(const std::string& text) noexcept override;

  // The functions below are for the steps and their delivery.

  // Sets the steps, which must live as long as a backward runs; keeps only a weak reference.
  void lead(const std::shared_ptr<BackwardSteps>& steps) { steps_ = steps; }
  // The lock is recursive: a communication hook, called with it held, may ask for a report.
  std::unique_lock<std::recursive_mutex> lock() const { return std::unique_lock(mutex_); }

  // Called when a backward has reached an output of a forward that synchronizes or not, or an
  // average whose graph comes from one that did.
  void output_gradient_arrived(bool synchronize = true);
  // Called before a gradient is accumulated. Arms all siblings at parameters.
  void gradient_due();
  // Called after a gradient was accumulated. Arms if an output, or the caller, asked for it.
  // Returns whether the backward synchronizes.
  bool gradient_came();
  // Begins a backward that no autograd runs (join, a reduction of what has accumulated).
  void begin_by_itself(Part part);
  // Notes that a backward awaits its finalization, or is over.
  void await_finalization() { phase_ = Phase::kAwaitingFinalize; }
  void end() { phase_ = Phase::kIdle; }
  void set_manual(bool manual) { manual_finalization_ = manual; }

  // Returns, once, whether a backward was prepared and none has come since; while it is held, the
  // caller of synchronize_unreached() handles that.
  bool take_unreached() { return !held_ && std::exchange(forced_, false); }

  bool is_idle() const { return phase_ == Phase::kIdle; }
  bool is_running() const { return phase_ == Phase::kRunning; }
  bool awaits_finalization() const { return phase_ == Phase::kAwaitingFinalize; }
  bool is_manual() const { return manual_finalization_; }
  bool is_at_parameters() const { return at_parameters_; }
  // Returns whether this one may wait for other ranks while backward runs.
  bool leads_siblings() const;

 private:
  enum class Phase : uint8_t { kIdle, kRunning, kAwaitingFinalize };
  class Scope;
  struct Beginning;

  bool synchronizes() const { return synchronize_ && !held_ && (!asked_ || asked_()); }
  void arm();
  void synchronize_if_unreached();
  void begin(BackwardSteps& steps, Part part);

  bool at_parameters_;
  mutable std::recursive_mutex mutex_;
  std::weak_ptr<BackwardSteps> steps_;
  std::vector<std::weak_ptr<BackwardTrigger>> siblings_;  // with this one
  std::function<void()> armed_;
  std::function<bool()> asked_;
  Phase phase_ = Phase::kIdle;
  bool forced_ = false;       // see prepare_for_backward()
  bool arms_at_any_ = false;  // whether an output of the last forward is unknown
  bool synchronize_ = true;   // see set_synchronize()
  bool held_ = false;         // see hold()
  bool wants_ = true;         // whether the last forward asked to synchronize, while held
  bool manual_finalization_ = false;
};

}  // namespace trireme
