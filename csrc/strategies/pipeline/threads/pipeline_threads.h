#pragma once

#include <trireme/comm/threads/thread_group.h>
#include <trireme/common/worker_pool.h>
#include <trireme/module/replica_random.h>
#include <trireme/strategies/pipeline/engine.h>
#include <trireme/strategies/pipeline/schedule_recomputation.h>
#include <trireme/strategies/pipeline/threads/leaf_edges.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

// Makes a pool with a thread on each of these devices; ATen's threads are divided among them.
// The caller starts the threads.
TRIREME_API std::shared_ptr<WorkerPool> pipeline_pool(std::vector<c10::Device> devices);

// Returns for each thread the device of the first parameter of its stages; for a thread without
// parameters that of the first stage with some.
TRIREME_API std::vector<c10::Device> devices_of_threads(
    const PipelineSchedule& schedule, const std::vector<PipelineStageRequest>& stages);

// Called with each exception that leaves a thread's actions, on that thread: `where` is what
// raised_in() says, empty where no stage of it raised. It may change the exception, and may not
// throw.
using ThreadErrorCallback =
    std::function<void(const std::string& where, const std::exception_ptr& error)>;

// A request for a pipeline in one process.
struct PipelineThreadsRequest {
  PipelineSchedule schedule = {};
  std::vector<PipelineStageRequest> stages = {};  // all, in their order
  bool scale_grads = true;
  std::vector<PipelineSkip> skips = {};
  ThreadErrorCallback on_error = {};
};

// Runs the actions of all ranks of a schedule, those of each rank on a thread of its own, on the
// pool's device for that. A thread does what a rank does (engine.h): its communicator is that of a
// group of threads (comm/threads), so that messages between threads are handed over by reference,
// and copied to another device. On devices all work is enqueued on the caller's current streams,
// and the caller waits for nothing but the loss.
//
// Parameters that stages of several threads share have a stand-in in all but the first of these
// (leaf_edges.h): their gradients are added up in the order of stages, as on ranks. Random layers
// draw from a generator of their thread, which torch.manual_seed() determines.
//
// Cost of a step: a wake-up of each thread, an all-reduce of 40 bytes in memory, and per message a
// hand-over under one lock. Callers take turns.
class TRIREME_API PipelineThreads final : public PipelineRunner {
 public:
  // The pool's threads must run: one for each rank of the schedule. Throws what PipelineEngine
  // does, and ValueError for a parameter that does not lie on the device of its thread.
  PipelineThreads(PipelineThreadsRequest request, std::shared_ptr<WorkerPool> pool);
  ~PipelineThreads() override;
  PipelineThreads(const PipelineThreads&) = delete;
  PipelineThreads& operator=(const PipelineThreads&) = delete;

  // An exception of a stage comes out as it was thrown; raised_in() says where. A step throws
  // NotImplementedError where a strategy averages gradients: collectives would come from several
  // threads.
  using PipelineRunner::step;
  void recover() override {}  // run() does
  at::Tensor step(std::vector<PipelineValue> inputs, const StepMode& mode) override;
  Evaluation eval_step(std::vector<PipelineValue> inputs, bool has_loss) override;
  const std::string& raised_in() const override { return raised_in_; }

  // A parameter in a pass: gradients come to stand-ins, one for each thread that has it, in the
  // order of stages.
  struct PassParameter {
    at::Tensor parameter;
    std::vector<std::pair<size_t, at::Tensor>> stand_ins = {};  // with their threads
    // Returns the sum of the gradients that came, and clears them.
    at::Tensor take_gradient();
  };
  // The state that is kept of a pass.
  struct PassState {
    std::vector<std::shared_ptr<KeptGraphs>> kept = {};  // one per thread
    std::vector<PassParameter> parameters = {};
    std::vector<c10::Stream> streams = {};  // the forward's, of the threads' devices
  };
  // Returns the runner of passes of that many micro-batches, with the same stages on the same
  // threads. Makes it the first time, and keeps it.
  std::shared_ptr<PipelineThreads> for_pass(int64_t micro_batches, Recomputation which);

  // Run the two halves of a pass (engine.h). The schedule has whole backwards. A backward is
  // enqueued on the streams of its forward, and the caller's current ones wait for it. Parts of the
  // loss come back in the order of micro-batches, and with `scale_grads` their weights are divided
  // by the number of micro-batches.
  PassOutputs forward_pass(std::vector<PipelineValue> inputs, PassState& state,
                           const PassOptions& options);
  void backward_pass(const PassState& state, const PassBackward& backward);

  bool is_on_devices() const { return is_on_devices_; }  // other than the CPU
  bool has_strategies() const override;
  bool divides_losses() const override;
  void expect_call() const override { pool_->expect_call(); }
  std::vector<at::Tensor> later_copies() const override { return {}; }
  const PipelineSchedule& schedule() const override { return schedule_; }
  // Returns the report of all stages. Bubbles are means over threads.
  PipelineReport last_step() const override;

 private:
  // A parameter that an earlier thread has, too, and its stand-in in this thread.
  struct Shared {
    at::Tensor parameter;
    at::Tensor stand_in;
  };

  using Job = std::function<void(size_t thread)>;
  // Runs a job on all threads. Throws what a stage threw, else what the first thread threw.
  void run(const Job& job);
  NamedParameters with_stand_ins(size_t thread, NamedParameters parameters);
  void list_parameters(const PipelineStageRequest& stage);
  void look_at_shared();
  void refuse_strategies() const;

  PipelineSchedule schedule_;
  bool scale_grads_;
  std::shared_ptr<WorkerPool> pool_;
  std::vector<c10::Device> devices_;  // one per thread
  bool is_on_devices_;
  ThreadGroup group_;
  std::mutex turn_;
  std::vector<size_t> indices_;                     // of all threads
  std::vector<PassParameter> parameters_;           // with undefined stand-ins
  std::vector<std::vector<Shared>> shared_;         // one list per thread
  std::vector<std::shared_ptr<LeafEdges>> leaves_;  // one for each thread
  std::shared_ptr<UnlistedGradients> unlisted_;
  std::vector<std::unique_ptr<PipelineEngine>> engines_;
  std::string raised_in_;
  // The parts of for_pass(), and the runners that it has made.
  std::vector<PipelineStageRequest> given_;
  std::vector<PipelineSkip> skips_;
  ThreadErrorCallback on_error_;
  std::map<std::pair<int64_t, Recomputation>, std::shared_ptr<PipelineThreads>> for_passes_;
};

}  // namespace trireme
