#pragma once

#include <trireme/comm/backend/arguments.h>
#include <trireme/comm/backend/hooks.h>
#include <trireme/comm/backend/p2p.h>
#include <trireme/comm/backend/queue.h>
#include <trireme/comm/backend/shm_backend.h>
#include <trireme/comm/backend/torch_compat.h>
#include <trireme/comm/hosts/group_collectives.h>
#include <trireme/common/fork_guard.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

// See shm_backend.h. Overrides the old names of c10d's verbs, which newer torch forwards to.
class ShmBackend final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Splits = std::vector<int64_t>;

  ShmBackend(const c10::intrusive_ptr<c10d::Store>& store, RankOf where, const ShmOptions& options);
  ~ShmBackend() override;

  const std::string getBackendName() const override;
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  uint64_t getSequenceNumberForGroup() override;
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                    const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override;
  // Called by the ranks that remain, also when a rank that goes has ended this group; with flag 1
  // the group is aborted first.
  bool supportsShrinking() const override { return true; }
  c10::intrusive_ptr<Backend> shrink(const std::vector<int64_t>& ranks_to_exclude, int flags,
                                     const c10::intrusive_ptr<Options>& options) override;
  void abort() override;     // all that waits, and all later calls, raise
  void shutdown() override;  // after what is queued
  // Returns whether all ranks share memory; false also if only the ranks of each host do.
  bool shares_memory() const { return collectives_ != nullptr; }
  // Returns whether any ranks share memory; Gloo does all if every rank is alone on its host.
  bool uses_memory() const { return collectives_ != nullptr || hosts_ != nullptr; }
  // Defined in shm_backend_hooks.cpp; messages over Gloo are not reported.
  c10d::ErrorType getError() override;
  void registerOnCompletionHook(
      std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;        // waits for hooks, too; not for messages
  void enableCollectivesTiming() override {}  // they always are
  bool supportsAbortHooks() const TRIREME_HOOKS_OVERRIDE { return uses_memory(); }
  void registerAbortHook(int64_t id, AbortHook hook) TRIREME_HOOKS_OVERRIDE;
  void unregisterAbortHook(int64_t id) TRIREME_HOOKS_OVERRIDE;
  bool supportsCompletionHooks() const TRIREME_HOOKS_OVERRIDE { return uses_memory(); }
  void registerCompletionHook(int64_t id, CompletionHook hook) TRIREME_HOOKS_OVERRIDE;
  void unregisterCompletionHook(int64_t id) TRIREME_HOOKS_OVERRIDE;

  // Defined in shm_backend_memory.cpp: local calls, but for new_window(), which is collective.
  bool supportsTensorAlloc(c10::DeviceIndex /*index*/) override { return shares_memory(); }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  bool supportsWindow() const TRIREME_WINDOW_OVERRIDE { return shares_memory(); }
  c10::intrusive_ptr<Window> new_window(const std::optional<at::Tensor>& tensor)
      TRIREME_WINDOW_OVERRIDE;
  // Tells the hooks and getError() about a fault outside the operations.
  void note(const shm::Fault& fault) noexcept;

  // Does this group's part of leave_all_groups().
  void end_run(const std::string& error) noexcept;

  // Ends the group with a reason that all ranks repeat; abort() ends Gloo's below it, too.
  void fail(const std::string& reason) noexcept;

  // For communicators. host_group() are the ranks of this host; it may only be called if
  // uses_memory().
  shm::HostGroup& host_group() { return *group_; }
  // Abandons work as shm::HostGroup::abandon does. Queued operations that have not begun end with
  // that reason, too.
  void abandon(const std::string& reason) noexcept;
  using Task = std::function<void(shm::Collectives&, const shm::CallOptions&)>;
  // Runs `task` in the order of the group's operations, if shares_memory(); returns when it has
  // run.
  void run_in_order(const char* title, Task task);
  // Runs `task` as run_in_order() does, if only the ranks of each host share memory.
  using HostsTask = std::function<void(MultiHostCollectives&, const shm::CallOptions&)>;
  void run_between_hosts(const char* title, HostsTask task);
  // Starts Host::all_gather_in_host, if only the ranks of each host share memory.
  WorkPtr all_gather_in_host(const TensorLists& parts);
  // Broadcasts tensors of one dtype as if they were one.
  WorkPtr broadcast_coalesced(Tensors& tensors, const c10d::BroadcastOptions& options);

  // Names the data of all operations that this thread submits while it lives. Errors repeat the
  // name, and ranks compare it.
  class ScopedLabel {
   public:
    explicit ScopedLabel(std::string label);
    ~ScopedLabel();
    ScopedLabel(const ScopedLabel&) = delete;
    ScopedLabel& operator=(const ScopedLabel&) = delete;
  };

  // Defined in shm_backend_verbs.cpp.
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, Splits& output_splits,
                        Splits& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

 private:
  // The arguments of an operation when its turn has come.
  struct Call {
    GroupCollectives run;
    shm::CallOptions options;
    shm::Dtype dtype;
  };
  using Run = std::function<void(Call&)>;

  struct Request {
    template <typename C10dOptions>
    Request(ShmArguments arguments, c10d::OpType type, const char* title, Tensors outputs,
            const C10dOptions& options)
        : arguments(std::move(arguments)),
          type(type),
          title(title),
          outputs(std::move(outputs)),
          timeout(options.timeout),
          synchronous(!options.asyncOp) {}

    ShmArguments arguments;
    c10d::OpType type;
    const char* title;  // name of the profiler's range
    Tensors outputs;
    std::chrono::milliseconds timeout;
    bool synchronous;
    uint64_t list_hash = 0;  // see shm::CallOptions
  };

  void meet();
  std::string why_not_met(int64_t incarnation, const std::exception& error) const;
  void meet_hosts(const std::string& incarnation);
  WorkPtr submit(Request request, Run run);
  uint64_t open_epoch() const;
  void refuse_if_over(uint64_t epoch) const;
  void run_alone(const char* title, Run run);
  uint64_t leave(const std::string& reason);
  static void run_or_refuse(Call& call, const char* name, const Run& run);
  WorkPtr broadcast_from(Request request, int64_t root);
  WorkPtr all_reduce(Request request, const c10d::ReduceOp& op);
  WorkPtr all_gather_into(Request request, const Tensors& outputs, const Tensors& inputs);
  WorkPtr reduce_scatter_from(Request request, const Tensors& outputs, const Tensors& inputs,
                              const c10d::ReduceOp& op);

  c10::intrusive_ptr<c10d::Store> store_;
  RankOf where_;
  ShmOptions shm_options_;
  c10::intrusive_ptr<Options> options_;
  ForkGuard fork_guard_;
  std::atomic<uint64_t> sequence_{0};
  int64_t shrinks_ = 0;
  std::unique_ptr<shm::HostGroup> group_;
  std::unique_ptr<shm::Collectives> collectives_;
  std::shared_ptr<ShmHooks> hooks_ = std::make_shared<ShmHooks>();
  std::unique_ptr<ShmP2p> p2p_;
  // Replace the two above if ranks are on several hosts. hosts_ is there only if some ranks share a
  // host; inner_ does what hosts_ does not do.
  std::unique_ptr<MultiHostCollectives> hosts_;
  c10::intrusive_ptr<Backend> inner_;
  ShmQueue queue_;  // last: its thread uses all of the above
};

}  // namespace trireme
