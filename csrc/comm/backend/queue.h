#pragma once

#include <trireme/comm/backend/hooks.h>
#include <trireme/comm/backend/torch_compat.h>
#include <trireme/common/error.h>
#include <trireme/common/fork_guard.h>

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

// The operations of one group, run one after the other in the order in which they were submitted.
// Three threads may run them: the caller's, if it waits for the result anyway and nothing is ahead
// of it (a hand-over costs more than a small collective); a thread that waits for one of them; and
// one of the queue's own. If the ranks of this host keep all its CPUs busy the last one holds back
// for a while: a second thread per rank would only take the time that it gains from the first.
//
// Callbacks of futures run in the order of their operations. One may wait for a later operation
// (communication hooks chain them): operations submitted from within a callback are run by another
// thread while that callback lasts, and so is the rest of the queue if it lasts long: later
// callbacks may then overtake that one.
class ShmQueue {
 public:
  using Run = std::function<void()>;
  using Clock = std::chrono::steady_clock;

  // Tells the group that this rank abandons its operation, for that reason; returns the epoch.
  using Abandon = std::function<uint64_t(const std::string& reason)>;

  // All ranks of the group are taken to share the CPUs of this host.
  ShmQueue(RankOf where, Abandon abandon);
  ~ShmQueue();  // runs what is queued first
  ShmQueue(const ShmQueue&) = delete;
  ShmQueue& operator=(const ShmQueue&) = delete;

  // Runs or queues `run`, whose error is thrown here if `synchronous`, else is in the Work. Throws
  // if this thread runs an operation of this queue already: in a signal handler, while it waits.
  void submit(const c10::intrusive_ptr<ShmWork>& work, bool synchronous, Run run);
  // Ends all operations that have not begun with this exception.
  void cancel(const std::exception_ptr& why);

  // Note that an operation has ended because this epoch of the group was abandoned
  // (shm::HostGroup): without the caller's knowledge until it waits for that operation; or with it.
  void note_untold(uint64_t epoch) { shared_->untold = epoch; }
  void note_told(uint64_t epoch) { shared_->told = epoch; }
  // Returns whether an operation submitted now belongs to the epoch after the abandoned one, and is
  // not a further step of the abandoned work.
  bool is_told(uint64_t epoch) const;
  bool is_idle() const;
  // Waits until nothing is queued or running. May throw an Interruption, with the queue given up.
  void drain();

 private:
  friend class ShmWork;
  struct Task {
    c10::intrusive_ptr<ShmWork> work;
    Run run;
    Clock::time_point worker_takes_it_at;
    bool from_callback = false;
  };
  // The state that a Work, which may outlive the queue, shares with it.
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
    Abandon abandon;  // valid until the last drain() has returned
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
  ForkGuard fork_guard_;
};

// One operation of the backend, before, while and after it runs.
class ShmWork final : public c10d::Work {
 public:
  ShmWork(int rank, c10d::OpType type, const char* title, std::vector<at::Tensor> outputs,
          uint64_t sequence)
      : Work(rank, type, title), outputs_(std::move(outputs)), sequence_(sequence) {}

  // Runs what is queued up to this, unless another thread is at it. With a timeout the queue's own
  // thread runs it: if the time is over, wait() throws c10::DistBackendError, the operation goes
  // on, and may be waited for again.
  bool wait(std::chrono::milliseconds timeout) override;
  // Makes the queue's own thread take the operation at once, since a future is waited for in a
  // place that cannot run operations.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::vector<at::Tensor> result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return sequence_; }
  float getDuration() const override;  // milliseconds, of the operation itself
  uint64_t getCompletionKey() const TRIREME_HOOKS_OVERRIDE { return key_; }

  // Sets the hooks to call when the work ends well. Called before it is submitted.
  void report_to(std::shared_ptr<ShmHooks> hooks) { hooks_ = std::move(hooks); }

  std::optional<ShmQueue::Clock::time_point> finished_at() const;

 private:
  friend class ShmQueue;
  void wait_for_end(ShmQueue::Shared& queue, std::chrono::milliseconds timeout);
  void complete(const std::exception_ptr& error);
  void run_callbacks(const std::exception_ptr& error);
  // Returns whether completing it runs code of others.
  bool has_callbacks() {
    const std::lock_guard<std::mutex> lock(future_mutex_);
    return future_ || (hooks_ && hooks_->hears_completions());
  }

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
