#pragma once

#include <trireme/common/export.h>
#include <trireme/common/fork_guard.h>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace trireme {

// The words for a pool's threads in errors.
struct PoolWords {
  const char* area = "data_parallel";
  const char* thread = "a replica";
  const char* threads = "the replicas";
  const char* maker = "DataParallel";
};

// Sets what goes along with jobs, of a thread state that this library does not know: `capture` is
// called on the thread that gives a job, and the function that it returns on each worker, where
// that one's result lives as long as the job. It may return nothing. One for the process.
using Carried = std::function<std::shared_ptr<void>()>;
TRIREME_API void carry_to_workers(Carried (*capture)()) noexcept;

// Returns the current streams of devices, each once; those without streams are left out.
TRIREME_API std::vector<c10::Stream> current_streams(const std::vector<c10::Device>& devices);

// Threads that stay, one per replica or row. Each has its own current device and number of intra-op
// threads, and for as long as a job runs the grad mode, autocast, profiler and dispatch modes of
// the thread that gave it, its current streams of the devices of all threads, and the state of
// carry_to_workers().
//
// The threads are the pool's own (start()), or the caller's, which calls a worker_loop() on each:
// Python's have to be made by Python. Thread-safe; one run() at a time, the next one waits. No
// run() from within a job of the same pool.
class TRIREME_API WorkerPool {
 public:
  // `intra_op_threads` has a number per worker, as many as `devices`; at least one of each.
  WorkerPool(std::vector<c10::Device> devices, std::vector<int> intra_op_threads,
             PoolWords words = {});
  ~WorkerPool();  // stops; the threads of start() have ended
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  size_t count() const;
  std::vector<c10::Device> devices() const;  // one per worker

  // Starts threads of the pool; worker_loop() is the other way.
  void start();
  // Returns, instead of start(), a function that runs the jobs of `worker` on the thread that calls
  // it, and returns when the pool is gone. It does not keep the pool alive.
  std::function<void()> worker_loop(size_t worker);
  // Lets the threads end. Not while a job runs.
  void stop() noexcept;
  // Returns a function that stops the pool, also when its maker has dropped the pool and it lives
  // in a graph. It does not keep the pool alive.
  std::function<void()> stopper();

  // Tell pools apart: the id of this one, and of the one that this thread serves, null if none.
  const void* id() const { return state_.get(); }
  static const void* served_here();
  // Throws ValueError from within a job, and in a child that a process with the pool has forked,
  // where its threads are missing.
  void expect_call() const;

  using Job = std::function<void(size_t worker)>;
  // Calls job(w) on each of `workers`, at the same time, and returns when all have returned: the
  // exception of each, or null, parallel to `workers`. Cost: two thread wake-ups, one after the
  // other. `while_waiting` is called some twenty times a second on the calling thread; it must not
  // throw.
  //
  // Throws what expect_call() does, and ValueError after stop().
  std::vector<std::exception_ptr> run(const std::vector<size_t>& workers, const Job& job,
                                      const std::function<void()>& while_waiting = {});

 private:
  struct Task;
  struct State;

  std::shared_ptr<State> state_;  // shared with the workers
  std::vector<std::thread> threads_;
  std::mutex turn_;  // held by run()
  ForkGuard fork_guard_;
  PoolWords words_;
};

}  // namespace trireme
