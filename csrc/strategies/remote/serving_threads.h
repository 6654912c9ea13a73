#pragma once

#include <trireme/common/export.h>
#include <trireme/shm/flag_wait.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <thread>

namespace trireme::remote {

// The source of messages. Called by any thread.
class TRIREME_API Source {
 public:
  virtual ~Source() = default;
  // Takes the messages that have come, and runs no user code. Returns whether there were any.
  virtual bool poll() = 0;
  // Checks whether peers live; called every shm::kLookEvery, however many messages come.
  virtual void look() = 0;
  virtual shm::Futex& futex() = 0;
};

// [Note: who takes messages]
//
// A hand-over from thread to thread costs more than a small call. So a thread that waits for an
// answer polls messages itself, and while none waits, an idle thread polls them and runs the jobs
// that it finds. If such a job takes long, another thread, which ticks meanwhile, takes over the
// polling within a millisecond or two. A polling thread spins, yielding to others, for a bounded
// time, and then sleeps on the futex of the source. An idle thread ticks for a while after it was
// last of use, and then sleeps as long as another one polls.
//
// A job that waits does not count as one of the `threads` jobs that run at one time; another thread
// is started if none is left, so that calls from process to process and back again end. Once they
// have ended, the threads that are not needed any more end, too.

// Runs jobs on threads, which take messages while they have nothing to do. Thread-safe.
class TRIREME_API ServingThreads {
 public:
  using Job = std::function<void()>;

  // Runs at most `threads` jobs at one time. The source outlives stop(). `ranks`: of this host,
  // which wait beside this one.
  ServingThreads(Source& source, int64_t threads, int64_t ranks);
  ~ServingThreads();  // stop()
  ServingThreads(const ServingThreads&) = delete;
  ServingThreads& operator=(const ServingThreads&) = delete;

  void start();
  void run(Job job);
  // Takes messages until `enough` returns true; returns false once `until` has passed. Throws an
  // Interruption (common/interruption.h). A job that calls it does not count meanwhile.
  bool wait(const std::function<bool()>& enough, std::optional<shm::Clock::time_point> until);
  // Waits in the same way, but leaves messages to the threads, which run the jobs they find without
  // a hand-over. Notices within milliseconds. Not from within a job.
  bool rest(const std::function<bool()>& enough, shm::Clock::time_point until);
  // A guard under which the job of this thread does not count; does nothing outside of a job.
  class TRIREME_API Pause {
   public:
    explicit Pause(ServingThreads& threads);
    ~Pause();
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    ServingThreads* threads_;
  };

  // Returns whether no job runs or waits to be run.
  bool is_idle() const;
  // Returns whether this thread has a job and so many jobs wait for others that no call may be
  // added. A thread without a job is in no circle of calls, and adds no waiting job.
  bool is_exhausted() const;
  // Runs the jobs that are left, and ends the threads. Not from within a job.
  void stop();
  // Starts no more jobs, at the end of a process: waits a second for running ones, and leaves the
  // threads behind, which use this object and the source as long as the process lives.
  void leave();

 private:
  void work();
  void start_thread();
  bool may_run() const { return !jobs_.empty() && running_ < threads_; }
  int64_t without_job() const { return static_cast<int64_t>(all_.size()) - in_jobs_; }
  void end_this_thread(std::unique_lock<std::mutex>& lock);
  void run_first(std::unique_lock<std::mutex>& lock);
  void lead(std::unique_lock<std::mutex>& lock);
  void call_someone();
  void look_if_due(shm::Clock::time_point now);
  template <typename Enough>
  bool drive(const Enough& enough, std::optional<shm::Clock::time_point> until, bool interrupts);

  Source& source_;
  const int64_t threads_;
  const std::chrono::microseconds patience_;
  std::atomic<shm::Clock::rep> look_at_{0};  // when the next look() is due

  mutable std::mutex mutex_;  // guards all that follows
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  std::list<std::thread> all_;
  std::list<std::thread> ended_;  // the last thread that ended itself
  int64_t running_ = 0;           // jobs that do not wait
  int64_t in_jobs_ = 0;           // threads with a job
  int64_t ticking_ = 0;
  int64_t asleep_ = 0;
  int64_t drivers_ = 0;  // threads in wait()
  bool leads_ = false;   // one of the threads takes messages
  uint64_t led_ = 0;     // counts changes of the thread that takes messages
  bool stopping_ = false;
  bool left_ = false;
};

}  // namespace trireme::remote
