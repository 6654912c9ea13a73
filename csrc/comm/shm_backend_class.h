#pragma once

#include <trireme/comm/shm_arguments.h>
#include <trireme/comm/shm_backend.h>
#include <trireme/comm/shm_p2p.h>
#include <trireme/comm/shm_queue.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

// See shm_backend.h. Old names of c10d's verbs are overridden, which newer torch forwards to.
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
  void abort() override;     // whatever waits, and whatever is called later, raises
  void shutdown() override;  // after what is queued
  // False where Gloo stands in.
  bool shares_memory() const { return collectives_ != nullptr; }
  // The same as abort(), with a reason that all ranks repeat.
  void fail(const std::string& reason) noexcept;

  // What the operations that this thread submits meanwhile move: in errors, and compared between
  // the ranks.
  class ScopedLabel {
   public:
    explicit ScopedLabel(std::string label);
    ~ScopedLabel();
    ScopedLabel(const ScopedLabel&) = delete;
    ScopedLabel& operator=(const ScopedLabel&) = delete;
  };

  // shm_backend_verbs.cpp
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
  // What an operation is given when its turn has come.
  struct Call {
    shm::Collectives& run;
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
    const char* title;  // of the profiler's range
    Tensors outputs;
    std::chrono::milliseconds timeout;
    bool synchronous;
  };

  void meet();
  WorkPtr submit(Request request, Run run);
  WorkPtr all_reduce(Request request, const c10d::ReduceOp& op);
  WorkPtr all_gather_into(Request request, const Tensors& outputs, const Tensors& inputs);
  WorkPtr reduce_scatter_from(Request request, const Tensors& outputs, const Tensors& inputs,
                              const c10d::ReduceOp& op);

  c10::intrusive_ptr<c10d::Store> store_;
  RankOf where_;
  ShmOptions shm_options_;
  c10::intrusive_ptr<Options> options_;
  uint64_t forks_;  // of this process, when the backend was made
  std::atomic<uint64_t> sequence_{0};
  std::unique_ptr<shm::HostGroup> group_;
  std::unique_ptr<shm::Collectives> collectives_;
  std::unique_ptr<ShmP2p> p2p_;
  c10::intrusive_ptr<Backend> inner_;  // in place of the three above, where memory is not shared
  ShmQueue queue_;                     // last: its thread uses all of the above
};

}  // namespace trireme
