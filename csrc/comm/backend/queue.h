#pragma once

#include <trireme/comm/backend/hooks.h>
#include <trireme/comm/backend/torch_compat.h>
#include <trireme/common/error.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace trireme {

class ShmWork;

// Runs operations of one group, one after the other in the order in which they were submitted.
// Three threads may run them: the caller's, where it waits for the result anyway and nothing is
// ahead of it (a hand-over costs more than a small collective); that of whoever waits for one of
// them; and one of the queue's own. Where the ranks of this host keep all its CPUs busy the last
// one holds back for a while: a second thread per rank would only take the time that it gains from
// the first.
//
// Callbacks of futures run in the order of their operations. One may wait for a later operation
// (communication hooks chain them): what was submitted from within a callback is run by another
// thread while that callback lasts, and whatever else is queued if it lasts long: its callbacks may
// then overtake that one.
class ShmQueue {
 public:
  using Run = std::function<void()>;
  using Clock = std::chrono::steady_clock;

  // Tells the group that this rank abandons what it is at, for that reason; returns the epoch.
  using Abandon = std::function<uint64_t(const std::string& reason)>;

  // All ranks of the group are taken to share the CPUs of this host.
  ShmQueue(RankOf where, Abandon abandon);
  ~ShmQueue();  // after what is queued
  ShmQueue(const ShmQueue&) = delete;
  ShmQueue& operator=(const ShmQueue&) = delete;

  // `run` throws what went wrong; synchronously that is thrown here, else it is in the Work. Throws
  // where this thread runs an operation of this queue already: in a signal handler, while it waits.
  void submit(const c10::intrusive_ptr<ShmWork>& work, bool synchronous, Run run);
  // What has not begun ends with this exception.
  void cancel(const std::exception_ptr& why);

  // An operation has ended because this epoch of the group was abandoned (shm::HostGroup), which
  // the caller does not know until it waits for that; or it knows.
  void note_untold(uint64_t epoch) { shared_->untold = epoch; }
  void note_told(uint64_t epoch) { shared_->told = epoch; }
  // Says whether a caller who submits now means what comes after the epoch that was abandoned, and
  // not a further step of what ended with it.
  bool is_told(uint64_t epoch) const;
  bool is_idle() const;
  // Returns when nothing is queued or running. May throw an Interruption, with what is queued given
  // up.
  void drain();

 private:
  friend class ShmWork;
  struct Task {
    c10::intrusive_ptr<ShmWork> work;
    Run run;
    Clock::time_point worker_takes_it_at;
    bool from_callback = false;
  };
  // Holds what a Work, which may outlive the queue, shares with it.
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Task> tasks;
    bool busy = false;
    bool ending = false;
    size_t from_callbacks = 0;        // tasks that callbacks submitted
    size_t in_callbacks = 0;          // threads
    size_t workers_in_callbacks = 0;  // those among the queue's own threads
    Clock::time_point callbacks_began;
    std::atomic<uint64_t> untold{0};  // epochs; 0: none
    std::atomic<uint64_t> told{0};
    RankOf where;
    Abandon abandon;  // until drain() has returned for the last time
  };
  struct Ended {
    c10::intrusive_ptr<ShmWork> work;
    std::exception_ptr error;
  };
  static Ended run_next(Shared& shared, std::unique_lock<std::mutex>& lock);
  static void tell(Shared& shared, std::unique_lock<std::mutex>& lock, Ended ended);
  static std::exception_ptr run_next_and_tell(Shared& shared, std::unique_lock<std::mutex>& lock);
  static void run_until_done(Shared& shared, ShmWork& work);
  static void hurry(Shared& shared, const ShmWork& work);
  static void rethrow_interruption(Shared& shared, const std::exception_ptr& error);
  static void leave(Shared& shared, ShmWork& work, const std::string& reason);
  static void refuse_within(const Shared& shared, const char* call);
  void run_next_and_stand_in(std::unique_lock<std::mutex>& lock);
  void start_worker();
  void work_off();

  int64_t ranks_;
  int64_t cpus_;
  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  std::vector<std::thread> workers_;  // under the mutex, until they are ending
  uint64_t forks_ = 0;                // forks_so_far() when the first worker started
};

// Is one operation of the backend, before, while and after it runs.
class ShmWork final : public c10d::Work {
 public:
  ShmWork(int rank, c10d::OpType type, const char* title, std::vector<at::Tensor> outputs,
          uint64_t sequence)
      : Work(rank, type, title), outputs_(std::move(outputs)), sequence_(sequence) {}

  // Runs what is queued up to this, unless another thread is at it. With a timeout that is left to
  // the queue's own thread: who gave up waiting throws c10::DistBackendError, the operation goes
  // on, and may be waited for again.
  bool wait(std::chrono::milliseconds timeout) override;
  // Who asks for a future will wait for it in a place that cannot run anything: the queue's own
  // thread then takes the operation at once.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::vector<at::Tensor> result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return sequence_; }
  float getDuration() const override;  // milliseconds, of the operation itself
  uint64_t getCompletionKey() const TRIREME_HOOKS_OVERRIDE { return key_; }

  // Says who hears when the work ends well. Called before it is submitted.
  void report_to(std::shared_ptr<ShmHooks> hooks) { hooks_ = std::move(hooks); }

  std::optional<ShmQueue::Clock::time_point> finished_at() const;

 private:
  friend class ShmQueue;
  void wait_for_end(ShmQueue::Shared& queue, std::chrono::milliseconds timeout);
  void complete(const std::exception_ptr& error);
  void run_callbacks(const std::exception_ptr& error);
  // Says whether completing it runs code of others.
  bool has_callbacks() {
    const std::lock_guard<std::mutex> lock(future_mutex_);
    return future_ || (hooks_ && hooks_->hears_completions());
  }
  void settle(c10::ivalue::Future& future, const std::exception_ptr& error);

  std::vector<at::Tensor> outputs_;
  uint64_t sequence_;
  uint64_t key_ = next_completion_key();
  std::shared_ptr<ShmHooks> hooks_;
  ShmQueue::Clock::time_point started_{};  // written before it is finished
  std::weak_ptr<ShmQueue::Shared> queue_;
  std::atomic<ShmQueue::Clock::rep> finished_{0};
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace trireme
