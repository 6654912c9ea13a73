#pragma once

#include <trireme/activation/kept_results.h>
#include <trireme/activation/saved_tensor_hooks.h>
#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

// [Note: how a checkpoint works]
//
// While the function of a checkpoint runs, what autograd would save goes nowhere: in its place the
// graph holds a SavedPlace, which only says "tensor i of this frame". The first place that a
// backward asks for its tensor makes the frame run the function again, under other hooks: the i-th
// tensor that is saved then is the one that place i stands for. That is all, and these rules follow
// those of torch.utils.checkpoint(use_reentrant=False):
//
// * The frame saves the function's inputs as autograd saves tensors, before its own hooks are
//   there. So an input that is changed in place is detected, and an outer checkpoint holds only the
//   inputs of an inner one.
// * A recomputation is of one graph task. Each of its tensors is handed out once and then held by
//   the node that unpacked it; a second backward over the same graph recomputes again. Tensors of
//   places that died with a part of the graph are not kept.
// * A recomputation ends as soon as the last tensor that the forward had saved is there (early
//   stop), by an exception out of the operator that saves it. If that operator has yet to write
//   what it saves, the function runs to its end instead.
// * A backward inside of the function works: a recomputation keeps its own graph alive, whose saved
//   tensors are plain ones.
//
// A caller that knows when a backward will come may recompute ahead of it, while the rank is idle.
// Tensors recomputed ahead serve all backwards over the graph, each as long as its place lives: a
// backward in two halves recomputes once.
//
// Torch does this in Python, with a weak dictionary of handles per graph task. Here a place holds
// its recomputed tensors itself, so that they die with it, and the frame holds places weakly.
//
// Several threads may ask at once (the engine has one per device, and a graph may be shared): a
// frame has a lock, and a thread that asks while another recomputes waits. Locks of frames are
// taken from inner to outer ones only.

class CheckpointFrame;

// The graph's placeholder for a tensor that is recomputed. Thread-safe.
class TRIREME_API SavedPlace : public PackedSavedTensor {
 public:
  SavedPlace(c10::intrusive_ptr<CheckpointFrame> frame, size_t number);
  ~SavedPlace() override;

  // Called when the last strong reference goes. The destructor runs only after the frame has
  // dropped its weak references.
  void release_resources() override;

  // Returns the tensor; the first call of a graph task for any tensor of the frame recomputes.
  // Throws what the function throws, and CheckpointError.
  at::Tensor unpack() override;

 private:
  friend class CheckpointFrame;

  struct Recomputed {
    int64_t task;
    at::Tensor tensor;  // undefined when it was handed out
  };

  // Drops what was recomputed for a graph task.
  void forget(int64_t task);

  c10::intrusive_ptr<CheckpointFrame> frame_;
  size_t number_;
  c10::SmallVector<Recomputed, 1> recomputed_;  // the frame's lock guards it
};

// The error of a recomputation that saves other tensors than the forward. In Python it is torch's
// class of this name.
class TRIREME_API CheckpointError : public c10::Error {
 public:
  using c10::Error::Error;
};

// The call that a checkpoint repeats in the backward.
class TRIREME_API CheckpointedCall {
 public:
  virtual ~CheckpointedCall() = default;

  // Calls the function on the tensors among its inputs, in the order in which they were saved. Runs
  // in the thread that unpacks, with grad mode on, and may be ended by StopRecomputation.
  virtual void run(const std::vector<at::Tensor>& inputs) = 0;

  // Returns the function's name, for messages.
  virtual std::string name() const = 0;

  // Called with the text of a CheckpointError before that is thrown; may throw a more detailed one.
  virtual void explain(const std::string& /*text*/) const {}
};

// One use of checkpoint().
class TRIREME_API CheckpointFrame : public SavedTensorPacker {
 public:
  struct Options {
    bool early_stop = true;
    bool compares_metadata = true;                   // shape, dtype and device of what is saved
    c10::intrusive_ptr<SavedTensorPacker> inputs{};  // packs the inputs; null: they are kept
  };

  // `inputs` are saved as autograd saves tensors, or packed as the options say. Throws what the
  // packer throws.
  CheckpointFrame(std::unique_ptr<CheckpointedCall> call, const std::vector<at::Tensor>& inputs,
                  const Options& options);

  // Packs what the forward saves.
  c10::intrusive_ptr<PackedSavedTensor> pack(const at::Tensor& tensor) override;

  bool is_checkpoint() const override { return true; }
  bool is_ordered() const override { return true; }

  // Called after the function has returned or thrown in the forward.
  void end_forward();

  // Recomputes before a backward asks, if that has not been done yet. Throws what the function
  // throws, and CheckpointError.
  void recompute_ahead();

  // Warns, once per process, if this checkpoint has nothing to recompute.
  void warn_if_useless() const;

  // Return the calls of functions that are under way on this thread, outer ones first, and whether
  // there is one.
  static CheckpointRuns runs();
  static bool is_under_way() { return !calls().empty(); }

  // Returns how many tensors the forward has saved.
  size_t saved() const { return places_.size(); }

 private:
  friend class CheckpointForward;
  friend class SavedPlace;
  class RecomputationPacker;
  class Run;

  // A call of the function on a thread. `taken`: number of kept results that it has got.
  struct Call {
    CheckpointFrame* frame;
    bool is_recomputation;
    size_t taken = 0;
  };

  struct Metadata {
    c10::SmallVector<int64_t, 5> sizes;
    at::ScalarType dtype;
    at::Device device;

    bool operator==(const Metadata&) const = default;
  };

  // The state of one recomputation.
  struct Task {
    int64_t id;
    size_t saved = 0;
    bool is_whole = false;  // the function has ended, by itself or early
    bool has_stopped = false;
    bool compares = true;
  };

  static Metadata metadata_of(const at::Tensor& tensor);
  // Returns this thread's calls that are under way.
  static std::vector<std::unique_ptr<Call>>& calls();

  // Takes a tensor that the recomputation for `task` saves, and returns what that recomputation's
  // graph holds for it; null if no further tensor is needed.
  c10::intrusive_ptr<PackedSavedTensor> pack_again(int64_t task, const at::Tensor& tensor);
  // Returns whether an operator that begins after `saved` tensors may save the last one.
  bool stops_soon(size_t saved) const;
  at::Tensor take_tensor(SavedPlace& place);
  Task& recomputation_of(int64_t task);
  void recompute(int64_t task);
  void check(const Task& task) const;
  [[noreturn]] void fail(const std::string& what) const;

  std::recursive_mutex mutex_;
  std::unique_ptr<CheckpointedCall> call_;
  bool early_stop_;
  bool compares_metadata_;
  std::vector<torch::autograd::SavedVariable> inputs_;
  std::vector<c10::weak_intrusive_ptr<SavedPlace>> places_;
  std::vector<Metadata> metadata_;  // one per place, if it is compared
  std::vector<Task> tasks_;
  std::vector<std::vector<at::Tensor>> kept_results_;  // made by once_per_forward()
  bool has_differentiable_inputs_ = false;
  bool forward_has_ended_ = false;
  bool is_ahead_ = false;  // recompute_ahead() has run
};

// Return whether a checkpoint's function runs on this thread as the forward, and as a
// recomputation.
TRIREME_API bool is_checkpointing();
TRIREME_API bool is_recomputing();

// A scope in which this thread's saved tensors go to a frame: its forward, or one part of it.
class TRIREME_API CheckpointForward {
 public:
  explicit CheckpointForward(const c10::intrusive_ptr<CheckpointFrame>& frame);
  ~CheckpointForward();
  CheckpointForward(const CheckpointForward&) = delete;
  CheckpointForward& operator=(const CheckpointForward&) = delete;

 private:
  c10::intrusive_ptr<CheckpointFrame> frame_;
  bool before_;
  PackerGuard guard_;
};

}  // namespace trireme
