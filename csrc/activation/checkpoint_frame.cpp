#include <trireme/activation/checkpoint_frame.h>

#include <trireme/activation/operator_watch.h>
#include <trireme/common/error.h>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

namespace trireme {
namespace {

// The number of backwards over one graph (retain_graph=True) whose recomputations a frame keeps.
constexpr size_t kMostTasks = 16;
// Operators that write a tensor after saving it save fewer tensors than this.
constexpr size_t kMostSaved = 8;
// The task id of tensors recomputed ahead of a backward. Neither the engine's graph tasks nor the
// ids that current_task() makes up have this value.
constexpr int64_t kAhead = INT64_MIN;

thread_local bool checkpoints = false;
thread_local bool recomputes = false;

// A scope in which a flag of this thread has a given value.
class FlagGuard {
 public:
  FlagGuard(bool& flag, bool value) : flag_(flag), before_(std::exchange(flag, value)) {}
  ~FlagGuard() { flag_ = before_; }
  FlagGuard(const FlagGuard&) = delete;
  FlagGuard& operator=(const FlagGuard&) = delete;

 private:
  bool& flag_;
  bool before_;
};

// A lock of a frame, which this thread may hold already.
class FrameLock {
 public:
  explicit FrameLock(std::recursive_mutex& mutex) : mutex_(mutex) {
    if (!mutex_.try_lock()) {
      SavedTensorHooks::get().lock(mutex_);
    }
  }
  ~FrameLock() { mutex_.unlock(); }
  FrameLock(const FrameLock&) = delete;
  FrameLock& operator=(const FrameLock&) = delete;

 private:
  std::recursive_mutex& mutex_;
};

// A saved tensor kept as it is.
class PlainTensor : public PackedSavedTensor {
 public:
  explicit PlainTensor(at::Tensor tensor) : tensor_(std::move(tensor)) {}
  at::Tensor unpack() override { return tensor_; }

 private:
  at::Tensor tensor_;
};

// A packer that returns a tensor packed beforehand.
class PackedBefore : public SavedTensorPacker {
 public:
  explicit PackedBefore(c10::intrusive_ptr<PackedSavedTensor> packed)
      : packed_(std::move(packed)) {}
  c10::intrusive_ptr<PackedSavedTensor> pack(const at::Tensor& /*tensor*/) override {
    return packed_;
  }
  bool is_ordered() const override { return true; }

 private:
  c10::intrusive_ptr<PackedSavedTensor> packed_;
};

}  // namespace

// A packer that assigns the tensors a recomputation saves to their places.
class CheckpointFrame::RecomputationPacker : public SavedTensorPacker {
 public:
  RecomputationPacker(c10::intrusive_ptr<CheckpointFrame> frame, int64_t task)
      : frame_(std::move(frame)), task_(task) {}

  c10::intrusive_ptr<PackedSavedTensor> pack(const at::Tensor& tensor) override {
    if (!watch_ && frame_->stops_soon(frame_->recomputation_of(task_).saved)) watch_.emplace();
    return frame_->pack_again(task_, tensor);
  }
  bool is_ordered() const override { return true; }

  bool watches_operators() const override { return frame_->stops_soon(0); }
  void end() noexcept override { watch_.reset(); }

 private:
  c10::intrusive_ptr<CheckpointFrame> frame_;
  int64_t task_;
  std::optional<OperatorWatch> watch_;
};

class CheckpointFrame::Run : public CheckpointRun {
 public:
  explicit Run(Call& call) : call_(call) {}
  bool is_recomputation() const override { return call_.is_recomputation; }
  void keep(const std::vector<at::Tensor>& result) override {
    const FrameLock lock(call_.frame->mutex_);
    call_.frame->kept_results_.push_back(result);
  }
  std::vector<at::Tensor> take() override {
    const FrameLock lock(call_.frame->mutex_);
    const auto& kept = call_.frame->kept_results_;
    return call_.taken < kept.size() ? kept[call_.taken++] : std::vector<at::Tensor>();
  }

 private:
  Call& call_;
};

std::vector<std::unique_ptr<CheckpointFrame::Call>>& CheckpointFrame::calls() {
  thread_local std::vector<std::unique_ptr<Call>> calls;
  return calls;
}

CheckpointRuns CheckpointFrame::runs() {
  CheckpointRuns runs;
  for (const auto& call : calls()) runs.push_back(std::make_unique<Run>(*call));
  return runs;
}

SavedPlace::SavedPlace(c10::intrusive_ptr<CheckpointFrame> frame, size_t number)
    : frame_(std::move(frame)), number_(number) {}

SavedPlace::~SavedPlace() = default;

void SavedPlace::forget(int64_t task) {
  const auto is_its = [&](const Recomputed& recomputed) { return recomputed.task == task; };
  recomputed_.erase(std::remove_if(recomputed_.begin(), recomputed_.end(), is_its),
                    recomputed_.end());
}

void SavedPlace::release_resources() {
  recomputed_.clear();
  frame_.reset();
}

at::Tensor SavedPlace::unpack() { return frame_->take_tensor(*this); }

CheckpointFrame::CheckpointFrame(std::unique_ptr<CheckpointedCall> call,
                                 const std::vector<at::Tensor>& inputs, const Options& options)
    : call_(std::move(call)),
      early_stop_(options.early_stop),
      compares_metadata_(options.compares_metadata) {
  std::vector<c10::intrusive_ptr<PackedSavedTensor>> packed(inputs.size());
  if (options.inputs) {
    packed = options.inputs->pack_inputs(inputs, call_->name());
  }
  inputs_.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    std::optional<PackerGuard> guard;
    if (packed[i]) {
      guard.emplace(c10::make_intrusive<PackedBefore>(std::move(packed[i])));
    }
    inputs_.emplace_back(inputs[i], /*is_output=*/false);
    has_differentiable_inputs_ |= inputs[i].defined() && inputs[i].requires_grad();
  }
}

c10::intrusive_ptr<PackedSavedTensor> CheckpointFrame::pack(const at::Tensor& tensor) {
  const FrameLock lock(mutex_);
  auto self = c10::intrusive_ptr<CheckpointFrame>::reclaim_copy(this);
  auto place = c10::make_intrusive<SavedPlace>(std::move(self), places_.size());
  places_.emplace_back(place);
  if (compares_metadata_) {
    metadata_.push_back(metadata_of(tensor));
  }
  return place;
}

c10::intrusive_ptr<PackedSavedTensor> CheckpointFrame::pack_again(int64_t id,
                                                                  const at::Tensor& tensor) {
  const at::Tensor detached = tensor.requires_grad() ? tensor.detach() : tensor;
  Task& task = recomputation_of(id);
  const size_t number = task.saved++;
  if (number >= places_.size()) {
    if (!forward_has_ended_) {
      // A backward inside of the function recomputes without an early stop, so it may save more
      // tensors than the forward has saved so far.
      task.compares = false;
    } else if (!task.has_stopped) {
      fail(c10::str("saved more than the ", places_.size(), " tensors of the forward"));
    }
    return c10::make_intrusive<PlainTensor>(detached);
  }
  // A place that no longer exists was freed with its part of the graph.
  if (const auto place = places_[number].lock()) {
    auto& kept = place->recomputed_;
    const auto was_given = [](const auto& recomputed) { return !recomputed.tensor.defined(); };
    kept.erase(std::remove_if(kept.begin(), kept.end(), was_given), kept.end());
    kept.push_back({id, detached});
  }
  if (early_stop_ && task.saved == places_.size() && !may_write_what_it_saves()) {
    task.has_stopped = true;
    return nullptr;
  }
  return c10::make_intrusive<PlainTensor>(detached);
}

bool CheckpointFrame::stops_soon(size_t saved) const {
  return early_stop_ && saved + kMostSaved >= places_.size();
}

void CheckpointFrame::end_forward() {
  const FrameLock lock(mutex_);
  forward_has_ended_ = true;
}

void CheckpointFrame::warn_if_useless() const {
  if (places_.empty() && !has_differentiable_inputs_) {
    TORCH_WARN_ONCE(error_text(
        "checkpoint",
        call_->name() + " got no input that requires a gradient and saved nothing for a backward, "
                        "expected something to recompute",
        {}, "Call it without checkpoint, or under torch.no_grad() if it is evaluated."));
  }
}

at::Tensor CheckpointFrame::take_tensor(SavedPlace& place) {
  const FrameLock lock(mutex_);
  const int64_t task = is_ahead_ ? kAhead : SavedTensorHooks::get().current_task();
  if (!recomputation_of(task).is_whole) {
    recompute(task);
  }
  const auto found = std::find_if(
      place.recomputed_.begin(), place.recomputed_.end(),
      [&](const SavedPlace::Recomputed& recomputed) { return recomputed.task == task; });
  if (found == place.recomputed_.end() || !found->tensor.defined()) {
    fail(c10::str("tensor ", place.number_,
                  " is asked for a second time in one backward, and each is kept once only"));
  }
  return is_ahead_ ? found->tensor : std::exchange(found->tensor, at::Tensor());
}

void CheckpointFrame::recompute_ahead() {
  const FrameLock lock(mutex_);
  if (places_.empty() || is_ahead_) return;
  recompute(kAhead);
  is_ahead_ = true;
}

CheckpointFrame::Task& CheckpointFrame::recomputation_of(int64_t id) {
  for (Task& task : tasks_) {
    if (task.id == id) {
      return task;
    }
  }
  if (tasks_.size() == kMostTasks) {
    // Drops the oldest task and its tensors; if that backward asks again, it recomputes again.
    const int64_t oldest = tasks_.front().id;
    for (const auto& weak : places_)
      if (const auto place = weak.lock()) place->forget(oldest);
    tasks_.erase(tasks_.begin());
  }
  return tasks_.emplace_back(Task{id});
}

void CheckpointFrame::recompute(int64_t id) {
  std::vector<at::Tensor> inputs;
  inputs.reserve(inputs_.size());
  for (const torch::autograd::SavedVariable& input : inputs_) {
    inputs.push_back(input.unpack());
  }
  // Discards the state of an earlier attempt that threw.
  recomputation_of(id) = Task{id};
  {
    const at::AutoGradMode grad_mode(true);
    const FlagGuard is_no_forward(checkpoints, false);
    const FlagGuard is_again(recomputes, true);
    const PackerGuard guard(c10::make_intrusive<RecomputationPacker>(
        c10::intrusive_ptr<CheckpointFrame>::reclaim_copy(this), id));
    calls().push_back(std::make_unique<Call>(Call{this, true}));
    const auto end = c10::make_scope_exit([] { calls().pop_back(); });
    call_->run(inputs);
  }
  Task& task = recomputation_of(id);
  task.is_whole = true;
  check(task);
}

void CheckpointFrame::check(const Task& task) const {
  if (!task.compares) {
    return;
  }
  // The function may have caught the error about one tensor too many.
  const bool saved_more = task.saved > places_.size() && !task.has_stopped;
  if (task.saved < places_.size() || saved_more) {
    fail(c10::str("saved ", task.saved, " tensors where the forward had saved ", places_.size()));
  }
  std::string differences;
  for (size_t i = 0; i < metadata_.size(); ++i) {
    const auto place = places_[i].lock();
    if (!place) {
      continue;
    }
    for (const SavedPlace::Recomputed& recomputed : place->recomputed_) {
      if (recomputed.task != task.id || !recomputed.tensor.defined()) {
        continue;
      }
      const Metadata again = metadata_of(recomputed.tensor);
      if (again != metadata_[i]) {
        const auto text = [](const Metadata& of) {
          return c10::str(of.dtype, c10::IntArrayRef(of.sizes), " on ", of.device);
        };
        differences += c10::str(differences.empty() ? "" : "; ", "tensor ", i, " is ", text(again),
                                " and was ", text(metadata_[i]));
      }
    }
  }
  if (!differences.empty()) {
    fail("saved other tensors than the forward: " + differences);
  }
}

void CheckpointFrame::fail(const std::string& what) const {
  const std::string text = error_text(
      "checkpoint", "the recomputation of " + call_->name() + " " + what, {},
      "Make the function do the same whenever it is called with the same inputs; debug=True lists "
      "the operators of both runs.");
  call_->explain(text);
  throw CheckpointError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text);
}

bool is_checkpointing() { return checkpoints; }

bool is_recomputing() { return recomputes; }

CheckpointForward::CheckpointForward(const c10::intrusive_ptr<CheckpointFrame>& frame)
    : frame_(frame), before_(std::exchange(checkpoints, true)), guard_(frame) {
  using Call = CheckpointFrame::Call;
  CheckpointFrame::calls().push_back(std::make_unique<Call>(Call{frame_.get(), false}));
}

CheckpointForward::~CheckpointForward() {
  CheckpointFrame::calls().pop_back();
  checkpoints = before_;
  frame_->end_forward();
}

CheckpointFrame::Metadata CheckpointFrame::metadata_of(const at::Tensor& tensor) {
  const bool has_sizes =
      !tensor.is_nested() && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  const auto sizes = has_sizes ? tensor.sizes() : c10::IntArrayRef();
  return {c10::SmallVector<int64_t, 5>(sizes), tensor.scalar_type(), tensor.device()};
}

}  // namespace trireme
