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
//   there. So an input that is changed in place is noticed, and an outer checkpoint holds no more
//   of an inner one than its inputs.
// * A recomputation is of one graph task. Each of its tensors is handed out once, and is then held
//   by whoever asked; a second backward over the same graph recomputes again. Tensors of places
//   that are gone, because a part of the graph was freed, are not kept.
// * It ends as soon as the last tensor that the forward had saved is there (early stop), by an
//   exception out of the operator that saved it. An operator that has yet to write what it saved
//   is not left: the function runs to its end.
// * A backward inside of the function works: a recomputation keeps its own graph alive, whose saved
//   tensors are plain ones.
//
// Who knows when a backward is to come may recompute ahead of it, while nothing else is to be done.
// Those tensors serve all backwards over the graph, each as long as its place: a backward in two
// halves recomputes once.
//
// Torch does this in Python, with a weak dictionary of handles per graph task. Here a place holds
// its recomputed tensors itself, so that they die with it, and the frame holds places weakly.
//
// Several threads may ask at once (the engine has one per device, and a graph may be shared): a
// frame has a lock, and a thread that asks while another recomputes waits. Locks of frames are
// taken from inner to outer ones only.

class CheckpointFrame;

// What the graph holds for a tensor that is recomputed. Thread-safe.
class TRIREME_API SavedPlace : public PackedTensor {
 public:
  SavedPlace(c10::intrusive_ptr<CheckpointFrame> frame, size_t number);
  ~SavedPlace() override;

  // Is called with the last strong reference. The destructor waits for the weak ones, which the
  // frame has.
  void release_resources() override;

  // Returns the tensor, recomputed if this is the first that the graph task asks of the frame.
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

// A recomputation saved something else than the forward. Python shows it as torch's class of this
// name.
class TRIREME_API CheckpointError : public c10::Error {
 public:
  using c10::Error::Error;
};

// What a checkpoint calls once more.
class TRIREME_API CheckpointedCall {
 public:
  virtual ~CheckpointedCall() = default;

  // Calls the function on the tensors among its inputs, in the order in which they were saved. It
  // is called in the thread that unpacks, with grad mode on. StopRecomputation may end it.
  virtual void run(const std::vector<at::Tensor>& inputs) = 0;

  // Returns the function's name, for messages.
  virtual std::string name() const = 0;

  // Hears of a CheckpointError before it is thrown, and may throw one that says more.
  virtual void explain(const std::string& /*text*/) const {}
};

// One use of checkpoint().
class TRIREME_API CheckpointFrame : public TensorPacker {
 public:
  struct Options {
    bool early_stop = true;
    bool compares_metadata = true;              // shape, dtype and device of what is saved
    c10::intrusive_ptr<TensorPacker> inputs{};  // packs the inputs; they are kept if there is none
  };

  // `inputs` are saved as autograd saves tensors, or packed as the options say. Throws what the
  // packer throws.
  CheckpointFrame(std::unique_ptr<CheckpointedCall> call, const std::vector<at::Tensor>& inputs,
                  const Options& options);

  // Packs what the forward saves.
  c10::intrusive_ptr<PackedTensor> pack(const at::Tensor& tensor) override;

  bool is_checkpoint() const override { return true; }
  bool is_ordered() const override { return true; }

  // The function has returned, or thrown.
  void end_forward();

  // Runs the function once more, before a backward asks, if it has not yet. Throws what the
  // function throws, and CheckpointError.
  void recompute_ahead();

  // Says once per process that a checkpoint has nothing to recompute, if this one has not.
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

  // A call of the function on a thread, and how many kept results a recomputation has got.
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

  // What is known of one recomputation.
  struct Task {
    int64_t id;
    size_t saved = 0;
    bool is_whole = false;  // the function has ended, by itself or early
    bool has_stopped = false;
    bool compares = true;
  };

  static Metadata metadata_of(const at::Tensor& tensor);
  // Returns those of this thread that are under way.
  static std::vector<std::unique_ptr<Call>>& calls();

  // Takes a tensor that the recomputation for `task` saves, and returns what its graph holds; null
  // if that was the last one that is needed.
  c10::intrusive_ptr<PackedTensor> pack_again(int64_t task, const at::Tensor& tensor);
  // Says whether an operator that begins when so many are saved may be the last one.
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
  std::vector<std::vector<at::Tensor>> kept_results_;  // once_per_forward() has made them
  bool has_differentiable_inputs_ = false;
  bool forward_has_ended_ = false;
  bool is_ahead_ = false;  // recompute_ahead() has run
};

// Tell a function of a checkpoint on this thread which of its calls this is: the forward, or the
// forward once more.
TRIREME_API bool is_checkpointing();
TRIREME_API bool is_recomputing();

// While it lives, what this thread saves goes to a frame: its forward, or one part of it.
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
