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

// What the graph holds in place of a tensor that autograd saves. It dies with its part of the
// graph. unpack() may be called from any thread, and more than once.
class TRIREME_API PackedTensor : public c10::intrusive_ptr_target {
 public:
  virtual at::Tensor unpack() = 0;
};

// Ends a function that has saved all that is wanted. It passes through the user's code; in Python
// it is an Exception of its own.
struct TRIREME_API StopRecomputation{};

// Says what becomes of tensors that autograd saves.
class TRIREME_API TensorPacker : public c10::intrusive_ptr_target {
 public:
  // May throw; that comes out of the operator that saves the tensor. Null ends the function that
  // runs under this packer: StopRecomputation comes out of the operator.
  virtual c10::intrusive_ptr<PackedTensor> pack(const at::Tensor& tensor) = 0;

  // Packs the inputs of one checkpoint; `function` names it in messages. Null stands for an input
  // that autograd keeps as it is. By default each is packed by itself.
  virtual std::vector<c10::intrusive_ptr<PackedTensor>> pack_inputs(
      const std::vector<at::Tensor>& inputs, const std::string& function);

  // Says whether tensors go nowhere and are recomputed: torch's selective policies ask.
  virtual bool is_checkpoint() const { return false; }

  // Says whether tensors are counted in the order in which one thread saves them.
  virtual bool is_ordered() const { return false; }

  // Says whether pack() asks may_write_what_it_saves().
  virtual bool watches_operators() const { return false; }

  // Hears that nothing more is saved.
  virtual void end() noexcept {}
};

// How packers get onto the stack of a thread. Torch keeps that stack in Python objects: where
// Python is loaded, the bindings register theirs. C++ programs get an engine of ours, installed by
// the first push(); torch's own asks nobody what becomes of saved tensors.
class TRIREME_API SavedTensorHooks {
 public:
  virtual ~SavedTensorHooks() = default;

  // Tensors that this thread saves go to `packer`, until pop() of this thread. Hooks that were
  // there before see none meanwhile.
  virtual void push(c10::intrusive_ptr<TensorPacker> packer) = 0;
  virtual void pop() = 0;

  // Returns what lets another thread have the hooks of this one for as long as the result of it
  // lives. Nothing where there are none, and for those of a checkpoint, which are ordered.
  virtual std::function<std::shared_ptr<void>()> carried() = 0;

  // Returns what tells one backward from another: the id of the engine's graph task, or a new
  // negative number outside of one.
  virtual int64_t current_task();

  // Says whether an exception out of a function is the end that a null of pack() brings about.
  virtual bool is_stop(const std::exception_ptr& error);

  // Return the calls that are under way on this thread of checkpoints that are not ours, and
  // whether it is worth looking for them.
  virtual CheckpointRuns runs_of_others() { return {}; }
  virtual bool may_have_runs_of_others() { return false; }

  // Waits for a lock. What the thread holds besides, such as the interpreter, it lets go meanwhile.
  virtual void lock(std::recursive_mutex& mutex) { mutex.lock(); }

  // Returns the process's hooks.
  static SavedTensorHooks& get();
  // `hooks` live as long as the process. Called once, before anybody pushes.
  static void use(SavedTensorHooks& hooks);
};

// Pushes a packer as long as it lives, on one thread.
class TRIREME_API PackerGuard {
 public:
  explicit PackerGuard(c10::intrusive_ptr<TensorPacker> packer);
  ~PackerGuard();
  PackerGuard(const PackerGuard&) = delete;
  PackerGuard& operator=(const PackerGuard&) = delete;

 private:
  c10::intrusive_ptr<TensorPacker> packer_;
  std::optional<OperatorWatch> watch_;
};

}  // namespace trireme
