#pragma once

#include <trireme/common/export.h>
#include <trireme/sync/held_backwards.h>

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
// A graph task that is destroyed before its end callback ran was left by an exception; its peers
// are told.

using VisitedNodes =
    std::unordered_map<torch::autograd::Node*, torch::autograd::GraphTask::ExecInfo>;

// How this rank takes part in a synchronized backward: with its gradients; or, while it has none
// (join), with zeros, leaving every .grad alone or not.
enum class Part : uint8_t { kGradients, kZeros, kZerosDelivered };

// What an Arming leads: it says when, they say what.
class BackwardSteps {
 public:
  virtual ~BackwardSteps() = default;
  // Around every forward with gradients enabled.
  virtual void forward_begins() = 0;
  virtual void forward_ends() = 0;
  // Says whether `leaf` is a parameter whose gradient is synchronized.
  virtual bool owns(const at::Tensor& leaf) const = 0;
  // Says whether a backward that visits these nodes only accumulates into any of the parameters.
  virtual bool is_visited_by(const VisitedNodes& visited) const = 0;
  // Throws where the group, or the caller's parameters, cannot go on.
  virtual void look_around() = 0;
  virtual void begin_backward(Part part) = 0;
  // Autograd has run through.
  virtual void finish_backward() = 0;
  // An exception has left the backward; `why` quotes it, or is empty.
  virtual void abandon_backward(const std::string& why) noexcept = 0;
  // Synchronizes what has accumulated, without a backward.
  virtual void reduce_accumulated() = 0;
  virtual void announce_failure(const std::string& text) noexcept = 0;
};

// Decides which backwards synchronize, and holds the lock of all who work on one. A strategy tells
// it what it sees of forwards.
//
// The thread that trains calls the functions of a strategy, without the GIL; hooks are called on
// autograd's threads.
class TRIREME_API Arming : public HeldBackwards, public std::enable_shared_from_this<Arming> {
 public:
  // `at_parameters` makes every backward that accumulates into a parameter synchronize, unless
  // set_synchronize(false) was called: for callers who see no forward.
  explicit Arming(bool at_parameters = false) : at_parameters_(at_parameters) {}

  // These two are called around every forward with gradients enabled. Further outputs may hide in
  // objects that the caller could not look into if `all_found` is false.
  void before_forward();
  void after_forward(const std::vector<at::Tensor>& outputs, bool synchronize,
                     bool all_found = true);
  // Makes the next backward that reaches an output or a parameter synchronize, whatever its forward
  // said; while it is held, unless the last forward, or the caller, said that none is to.
  void prepare_for_backward() override;
  // Says whether backwards synchronize that nobody has prepared. So does `asked`, if there is one,
  // each time.
  void set_synchronize(bool synchronize);
  void ask_to_synchronize(std::function<bool()> asked);
  // The callback is called when a backward is found to synchronize, before its first collective, on
  // the thread that runs it.
  void set_armed_callback(std::function<void()> callback);
  // Arms these together, in this order, whichever of them a backward reaches first. Ranks may get
  // gradients in different orders, or none (join), and still wait for each other in one order: the
  // first one's collectives go out while backward runs, those of the others, where gradients do not
  // stream, when it ends. Keeps none of them alive.
  static void arm_together(const std::vector<std::shared_ptr<Arming>>& siblings);

  // A pipeline calls these; see held_backwards.h.
  void hold(bool held) override;
  bool is_held() const;
  void synchronize_unreached() override;
  void announce_failure(const std::string& text) noexcept override;

  // What follows serves the steps and their landing.

  // The steps must live as long as a backward runs, not longer than they like.
  void lead(const std::shared_ptr<BackwardSteps>& steps) { steps_ = steps; }
  // The lock is recursive: a communication hook, called with it held, may ask for a report.
  std::unique_lock<std::recursive_mutex> lock() const { return std::unique_lock(mutex_); }

  // A backward has reached an output of a forward that synchronizes or not, or an average whose
  // graph comes from one that did.
  void output_gradient_arrived(bool synchronize = true);
  // A gradient is about to be accumulated. Arms all siblings at parameters.
  void gradient_due();
  // A gradient was accumulated. Arms if an output, or the caller, asked for it. Returns whether the
  // backward synchronizes.
  bool gradient_came();
  // Begins a backward that no autograd runs (join, a reduction of what has accumulated).
  void begin_by_itself(Part part);
  // A backward that was begun waits for its finalization, or is over.
  void await_finalization() { phase_ = Phase::kAwaitingFinalize; }
  void end() { phase_ = Phase::kIdle; }
  void set_manual(bool manual) { manual_finalization_ = manual; }

  // Says, once, whether a backward was prepared and none has come since; while it is held, the
  // caller of synchronize_unreached() sees to that.
  bool take_unreached() { return !held_ && std::exchange(forced_, false); }

  bool is_idle() const { return phase_ == Phase::kIdle; }
  bool is_running() const { return phase_ == Phase::kRunning; }
  bool awaits_finalization() const { return phase_ == Phase::kAwaitingFinalize; }
  bool is_manual() const { return manual_finalization_; }
  bool is_at_parameters() const { return at_parameters_; }
  // Says whether this one may wait for other ranks while backward runs.
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
  std::vector<std::weak_ptr<Arming>> siblings_;  // with this one
  std::function<void()> armed_;
  std::function<bool()> asked_;
  Phase phase_ = Phase::kIdle;
  bool forced_ = false;       // see prepare_for_backward()
  bool arms_at_any_ = false;  // an output of the last forward is not known
  bool synchronize_ = true;   // see set_synchronize()
  bool held_ = false;         // see hold()
  bool wants_ = true;         // what the last forward said, while it is held
  bool manual_finalization_ = false;
};

}  // namespace trireme
