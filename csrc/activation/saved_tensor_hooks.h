#pragma once

#include <trireme/activation/kept_results.h>
#include <trireme/activation/operator_watch.h>
#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

// The graph's stand-in for a tensor that autograd saves. It dies with its part of the graph.
// unpack() may be called from any thread, and more than once.
class TRIREME_API PackedSavedTensor : public c10::intrusive_ptr_target {
 public:
  virtual at::Tensor unpack() = 0;
};

// The exception that ends a function once all wanted tensors are saved. It passes through the
// user's code; in Python it is a subclass of Exception.
struct TRIREME_API StopRecomputation{};

// Decides what the graph holds in place of the tensors that autograd saves.
class TRIREME_API SavedTensorPacker : public c10::intrusive_ptr_target {
 public:
  // Packs a tensor. An exception passes out of the operator that saves the tensor. A null result
  // ends the function that runs under this packer: StopRecomputation passes out of the operator.
  virtual c10::intrusive_ptr<PackedSavedTensor> pack(const at::Tensor& tensor) = 0;

  // Packs the inputs of one checkpoint; `function` names it in messages. Null stands for an input
  // that autograd keeps as it is. By default each is packed by itself.
  virtual std::vector<c10::intrusive_ptr<PackedSavedTensor>> pack_inputs(
      const std::vector<at::Tensor>& inputs, const std::string& function);

  // Returns whether tensors are dropped and recomputed: torch's selective policies ask.
  virtual bool is_checkpoint() const { return false; }

  // Returns whether tensors are identified by the order in which one thread saves them.
  virtual bool is_ordered() const { return false; }
  // Returns whether pack() asks may_write_what_it_saves().
  virtual bool watches_operators() const { return false; }

  // Called when nothing more will be saved.
  virtual void end() noexcept {}
};

// The per-thread stack of packers. Torch keeps that stack in Python objects: if Python is loaded,
// the bindings register theirs. In C++ programs the first push() installs an autograd engine of
// ours, since torch's own has no default hooks for saved tensors.
class TRIREME_API SavedTensorHooks {
 public:
  virtual ~SavedTensorHooks() = default;

  // Sends the tensors that this thread saves to `packer`, until this thread calls pop(). Hooks
  // pushed before see none meanwhile.
  virtual void push(c10::intrusive_ptr<SavedTensorPacker> packer) = 0;
  virtual void pop() = 0;

  // Returns a function that gives another thread this thread's hooks for as long as its result
  // lives. Empty if there are none, and for those of a checkpoint, which are ordered.
  virtual std::function<std::shared_ptr<void>()> carried() = 0;

  // Returns an identifier of the present backward: the id of the engine's graph task, or a new
  // negative number outside of one.
  virtual int64_t current_task();

  // Returns whether an exception is the StopRecomputation that a null result of pack() causes.
  virtual bool is_stop(const std::exception_ptr& error);

  // Return this thread's calls under way of checkpoints that are not ours, and whether there may be
  // any.
  virtual CheckpointRuns runs_of_others() { return {}; }
  virtual bool may_have_runs_of_others() { return false; }

  // Waits for a lock, releasing meanwhile what the thread holds besides, such as the GIL.
  virtual void lock(std::recursive_mutex& mutex) { mutex.lock(); }

  // Returns the process's hooks.
  static SavedTensorHooks& get();
  // Registers `hooks`, which live as long as the process. Called once, before any push().
  static void use(SavedTensorHooks& hooks);
};

// A scope, on one thread, in which a packer is pushed.
class TRIREME_API PackerGuard {
 public:
  explicit PackerGuard(c10::intrusive_ptr<SavedTensorPacker> packer);
  ~PackerGuard();
  PackerGuard(const PackerGuard&) = delete;
  PackerGuard& operator=(const PackerGuard&) = delete;

 private:
  c10::intrusive_ptr<SavedTensorPacker> packer_;
  std::optional<OperatorWatch> watch_;
};

}  // namespace trireme
