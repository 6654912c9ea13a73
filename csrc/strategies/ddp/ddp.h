#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/grad/codes/compressed_transport.h>
#include <trireme/grad/codes/compression.h>
#include <trireme/grad/codes/kept_codes.h>
#include <trireme/grad/grad_reducer.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace trireme {

struct DdpOptions {
  // Whether ranks start from rank 0's parameters and buffers, after all have been compared.
  bool init_sync = true;
  bool init_sync_buffers = true;
  // Whether rank 0's buffers go to all ranks before each forward that follows a synchronized one.
  bool forward_sync_buffers = true;
  // The sizes of buckets in MiB; by default 25, the first 1. A list gives one cap per bucket, the
  // last one for all further buckets.
  std::optional<double> bucket_cap_mb = {};
  std::vector<double> bucket_cap_mb_list = {};
  bool gradient_as_bucket_view = false;
  // The dtype in which floating-point gradients travel; their own if absent.
  std::optional<at::ScalarType> reduce_dtype = {};
  // What gradients become on links between senders (grad/codes/compression.h); themselves if
  // absent.
  std::optional<Compression> compression = {};
};

// The tensors of a module that DDP keeps equal on all ranks.
struct ModuleTensors {
  NamedParameters parameters;
  std::vector<at::Tensor> buffers;
};

TRIREME_API BucketCaps bucket_caps(const DdpOptions& options);

// Synchronous data parallelism: every rank holds the model, sees its own part of the batch, and
// .grad is the average over the ranks when backward() returns
// (torch.nn.parallel.DistributedDataParallel; Li et al., VLDB 2020). Both front doors wrap it. A
// step is, in order:
//
//   before_forward    watch what the user froze or cast; buffers of rank 0 for all (sync_buffers)
//   forward           the user's
//   after_forward     watch what the user replaced; hooks on the outputs (see
//   grad/backward_trigger.h) backward          grad_hook -> bucket -> transport (all_reduce, or a
//   stream) -> whole_delivery step              the user's optimizer
//
// Bytes per rank and step: every gradient once through an all-reduce, 4 bytes per parameter,
// buffers once. Extra memory: none beside the gradients themselves (see [Note: who owns a
// gradient's memory]).
class TRIREME_API Ddp {
 public:
  // Throws ValueError on bad options, for parameters on several kinds of device, for sparse
  // gradients under compression and where ranks compress differently, and c10::Error,
  // as torch's DDP does, for a module without trainable parameters and (on all ranks alike, with
  // init_sync) where ranks hold different parameters.
  Ddp(ModuleTensors module, std::shared_ptr<Communicator> communicator, const DdpOptions& options);

  // `synchronize`: whether this forward's backward averages (false under no_sync). While an outer
  // Ddp leads this one, the calls go to that.
  void before_forward();
  void after_forward(const std::vector<at::Tensor>& outputs, bool synchronize,
                     bool all_found = true);

  // [Note: one inside another]
  // Averages alone for `inner`, whose module is a part of this one's: both reducers would take the
  // same gradients. A forward of the inner module counts as one of this Ddp, beside a forward of
  // this module too; inside of the latter, in one thread, it is not reported. The outermost Ddp
  // leads; once it is gone, the next.
  // Throws ValueError for an inner one that compresses otherwise, which nobody would do.
  void lead(Ddp& inner) const;
  // A guard that lives while the module of this Ddp runs its forward.
  class Running;
  [[nodiscard]] Running running();

  // Returns whether a pipeline holds back its backwards. No forward tells then which backward will
  // average: has_averaged() returns whether one has since its last call.
  bool is_held() const { return trigger_->is_held(); }
  bool has_averaged() {
    const int64_t step = reducer_->last_step().step;
    return std::exchange(seen_step_, step) != step;
  }

  // Broadcasts `buffers` of `root` to all ranks. One collective.
  void sync_buffers(const std::vector<at::Tensor>& buffers, int64_t root);
  // Broadcasts parameters and buffers of `root` to all ranks (the end of a join). A parameter that
  // has the values already is not written, since a sharded optimizer's must not be.
  void sync_module(const std::vector<at::Tensor>& buffers, int64_t root);

  // Puts `hook` in the place of the transport; see GradReducer. Throws c10::Error beside
  // compression, also where nothing is compressed.
  void set_comm_hook(std::shared_ptr<CommHook> hook);
  // Returns what codes keep of its gradients; nothing where nothing is compressed.
  std::vector<KeptCodes> kept_codes() const;

  BackwardTrigger& trigger() { return *trigger_; }
  GradReducer& reducer() { return *reducer_; }
  const GradReducer& reducer() const { return *reducer_; }
  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }
  // Returns the device of the first parameter; all are of its kind.
  c10::Device device() const { return reducer_->layout().device(); }

 private:
  // The BackwardTrigger to which inner Ddps report their forwards.
  struct Forwards {
    std::shared_ptr<BackwardTrigger> trigger;
    // Counts the running forwards of this thread: other threads may evaluate meanwhile.
    static std::unordered_map<const Forwards*, int64_t>& running_here();
    bool runs_here() const { return running_here().contains(this); }
  };

  void broadcast_module(const std::vector<at::Tensor>& parameters,
                        const std::vector<at::Tensor>& buffers, int64_t root);
  std::shared_ptr<Forwards> leading() const;

  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<BackwardTrigger> trigger_ = std::make_shared<BackwardTrigger>();
  std::shared_ptr<Forwards> forwards_ = std::make_shared<Forwards>(Forwards{trigger_});
  std::vector<std::weak_ptr<Forwards>> around_;  // the innermost first
  std::shared_ptr<GradReducer> reducer_;
  std::optional<Compression> compression_;
  GradientCoder* coder_ = nullptr;  // the reducer's; null if nothing is compressed
  int64_t seen_step_ = 0;           // see has_averaged()
};

class Ddp::Running {
 public:
  explicit Running(std::shared_ptr<Forwards> forwards) : forwards_(std::move(forwards)) {
    ++Forwards::running_here()[forwards_.get()];
  }
  ~Running() {
    const auto own = Forwards::running_here().find(forwards_.get());
    if (--own->second == 0) Forwards::running_here().erase(own);
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  std::shared_ptr<Forwards> forwards_;
};

inline Ddp::Running Ddp::running() { return Running(forwards_); }

}  // namespace trireme
