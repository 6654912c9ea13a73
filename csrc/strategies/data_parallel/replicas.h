#pragma once

#include <trireme/common/export.h>
#include <trireme/common/worker_pool.h>
#include <trireme/strategies/data_parallel/chunk_plan.h>
#include <trireme/strategies/data_parallel/grad_sum.h>
#include <trireme/strategies/data_parallel/replica_tensors.h>
#include <trireme/strategies/data_parallel/speed_balance.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace trireme {

class ReplicaPass;

// One replica's part of the last step (host clock, milliseconds).
struct ReplicaReport {
  c10::Device device = c10::Device(c10::kCPU);
  int64_t rows = 0;
  double forward_ms = 0;
  double backward_ms = 0;
  double waiting_share = 0;  // share of the slowest replica's time in which this one waited
  int64_t memory_bytes = 0;  // copies of parameters and buffers it holds for itself
};

struct ReplicasReport {
  int64_t step = 0;       // backwards so far
  double forward_ms = 0;  // what the caller sees
  double backward_ms = 0;
  int64_t copied_bytes = 0;  // to bring the replicas up to date
  std::vector<ReplicaReport> replicas = {};
};

struct ReplicasOptions {
  // The share of the batch per replica; all the same if empty.
  std::vector<double> weights = {};
  // Whether shares follow the measured speed of the replicas.
  bool auto_balance = false;
  // The device where outputs are gathered.
  c10::Device output_device = c10::Device(c10::kCPU);
  // Whether no replica shares memory with its master, and backwards are one run of the engine, as
  // on other devices: for tests.
  bool copy_always = false;
};

// The replicas of a module, the threads they run on, and their reports. Both front doors of
// DataParallel stand on this: a step is
//
//   auto pass = replicas->begin(rows);  // replicas follow their master, the batch is cut
//   pass->scatter(input, dim) ...
//   replicas->forward(*pass, job);      // a call of the module per replica, at the same time
//   pass->gather(outputs, ...)          // whose backward runs the replicas' at the same time
//
// Thread-safe between begin() of one pass and the next: passes take turns.
class TRIREME_API Replicas : public std::enable_shared_from_this<Replicas> {
 public:
  // The pool has one worker per replica, in the order of `module`.
  Replicas(ModuleReplicas module, std::shared_ptr<WorkerPool> pool, ReplicasOptions options);

  // Begins a forward on a batch of `rows`. See ReplicaTensors::refresh for what it copies. Warns,
  // once, when replicas take turns of very different length.
  std::shared_ptr<ReplicaPass> begin(int64_t rows);

  // Calls job(position) for each chunk of the pass, in the thread of its replica. An exception of a
  // job comes back when all have returned, the first in order of replicas if several threw: a
  // c10::Error with the name of its replica, any other exception nested in one that has it.
  using Job = std::function<void(size_t position)>;
  void forward(ReplicaPass& pass, const Job& job, const std::function<void()>& while_waiting = {});

  // Called in a replica's thread with an exception of its backward, before that goes on unchanged
  // (and not nested): the listener names the replica.
  using ErrorListener = std::function<void(size_t replica, const std::exception_ptr& error)>;
  void on_error(ErrorListener listener) { error_listener_ = std::move(listener); }

  // Called some twenty times a second while a backward runs in the replicas' threads. Returns the
  // exception to throw instead of its result, once the replicas have come to their next gradient
  // and stopped; null to go on.
  using Interrupt = std::function<std::exception_ptr()>;
  void on_wait(Interrupt interrupt) { interrupt_ = std::move(interrupt); }

  const ReplicasOptions& options() const { return options_; }
  ReplicaTensors& tensors() { return tensors_; }
  // Returns "replica 1 of 2 (cpu)".
  std::string describe(size_t replica) const;
  ReplicasReport last_step() const;

 private:
  friend class ReplicaPass;

  using RunBackward = std::function<void(const std::vector<size_t>& positions)>;
  // Returns sums of the gradients of all parameters. For ReplicaPass.
  std::vector<at::Tensor> backward(ReplicaPass& pass, const RunBackward& run);
  void run_all_backwards(ReplicaPass& pass, const RunBackward& run);
  void run(ReplicaPass& pass, const Job& job, bool is_forward,
           const std::function<void()>& while_waiting);
  void rethrow_first(const std::vector<size_t>& replicas,
                     const std::vector<std::exception_ptr>& errors) const;
  void note(const ReplicaPass& pass, bool with_backward);
  void warn_if_lopsided();

  ReplicaTensors tensors_;
  std::shared_ptr<WorkerPool> pool_;
  ReplicasOptions options_;
  GradSum grad_sum_;
  std::mutex turn_;  // held by what reads and writes the leaves
  ErrorListener error_listener_;
  Interrupt interrupt_;
  std::array<SpeedBalance, 2> balances_;  // without and with gradients

  mutable std::mutex report_mutex_;  // guards all below
  ReplicasReport report_;
  std::vector<double> smoothed_ms_;
  int64_t measured_steps_ = 0;
  bool warned_ = false;
  bool backward_in_engine_;  // true on devices for which the engine has a thread
};

}  // namespace trireme
