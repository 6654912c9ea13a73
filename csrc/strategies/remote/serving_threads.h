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

// Is what messages come from. Called by any thread.
class TRIREME_API Source {
 public:
  virtual ~Source() = default;
  // Takes what has come, and runs nothing of the user's. Returns true if anything has.
  virtual bool poll() = 0;
  // Looks whether peers live; called every shm::kLookEvery, however many messages come.
  virtual void look() = 0;
  virtual shm::Bell& bell() = 0;
};

// [Note: who takes messages]
//
// A hand-over from thread to thread costs more than a small call. So whoever waits for an answer
// takes messages himself, and a thread that has nothing to do takes them while nobody waits: a job
// that it finds there it runs itself. Its place is taken over within a millisecond or two by
// another thread that ticks meanwhile, if the job takes so long. Who takes messages lets others run
// for a bounded time, and then sleeps on the bell of the source. A thread ticks for a while after
// it was last of use, and then sleeps as long as somebody takes messages.
//
// A job that waits does not count as one of the `threads` jobs that run at one time; another thread
// is started where none is left, so that calls from process to process and back again end. Once
// they have ended, threads that are more than are needed without them end, too.

// Runs jobs on threads, and takes messages while these have nothing to do. Thread-safe.
class TRIREME_API ServingThreads {
 public:
  using Job = std::function<void()>;

  // Is to run at most `threads` jobs at one time. The source outlives stop(). `ranks` wait on this
  // host.
  ServingThreads(Source& source, int64_t threads, int64_t ranks);
  ~ServingThreads();  // stop()
  ServingThreads(const ServingThreads&) = delete;
  ServingThreads& operator=(const ServingThreads&) = delete;

  void start();
  void run(Job job);
  // Takes messages until `enough` returns true; returns false once `until` has passed. Throws an
  // Interruption (common/interruption.h). From within a job that job does not count meanwhile.
  bool wait(const std::function<bool()>& enough, std::optional<shm::Clock::time_point> until);
  // Waits in the same way, and leaves messages to the threads: they run what they find there
  // without a hand-over. Notices within milliseconds. Not from within a job.
  bool rest(const std::function<bool()>& enough, shm::Clock::time_point until);
  // Lets the job of this thread not count as long as it lives; does nothing outside of one.
  class TRIREME_API Pause {
   public:
    explicit Pause(ServingThreads& threads);
    ~Pause();
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    ServingThreads* threads_;
  };

  // Says whether no job runs or waits to be run.
  bool is_idle() const;
  // Says of a thread with a job whether so many jobs wait for others that none may be added. Who
  // has no job is in no circle of calls, and adds none.
  bool is_exhausted() const;
  // Runs what is left, and ends the threads. Not from within a job.
  void stop();
  // Runs nothing more, at the end of a process: waits a second for jobs that run, and leaves the
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
  std::atomic<shm::Clock::rep> look_at_{0};  // when the next look is due

  mutable std::mutex mutex_;  // guards all that follows
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  std::list<std::thread> all_;
  std::list<std::thread> ended_;  // the last one that was not needed any more
  int64_t running_ = 0;           // jobs that do not wait
  int64_t in_jobs_ = 0;           // threads with a job
  int64_t ticking_ = 0;
  int64_t asleep_ = 0;
  int64_t drivers_ = 0;  // threads in wait()
  bool leads_ = false;   // one of the threads takes messages
  uint64_t led_ = 0;     // counts who began to take messages
  bool stopping_ = false;
  bool left_ = false;
};

}  // namespace trireme::remote
