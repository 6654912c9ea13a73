#include <trireme/strategies/remote/serving_threads.h>

#include <trireme/common/interruption.h>
#include <trireme/common/thread_end.h>

#include <algorithm>
#include <pthread.h>
#include <utility>

// See [Note: who takes messages] in serving_threads.h.

namespace trireme::remote {
namespace {

using shm::Clock;

constexpr std::chrono::milliseconds kTick{1};
constexpr int kTicks = 20;
constexpr std::chrono::seconds kGrace{1};
// Each job that waits for others holds a thread; more jobs than this are calls in an endless
// circle.
constexpr int64_t kMostWaiting = 512;

thread_local int64_t jobs_of_thread = 0;

}  // namespace

ServingThreads::Pause::Pause(ServingThreads& threads)
    : threads_(jobs_of_thread > 0 ? &threads : nullptr) {
  if (threads_ == nullptr) return;
  const std::lock_guard lock(threads_->mutex_);
  --threads_->running_;
  if (threads_->may_run()) threads_->call_someone();
}

ServingThreads::Pause::~Pause() {
  if (threads_ == nullptr) return;
  const std::lock_guard lock(threads_->mutex_);
  ++threads_->running_;
}

ServingThreads::ServingThreads(Source& source, int64_t threads, int64_t ranks)
    : source_(source), threads_(threads), patience_(shm::patience_of(ranks)) {}

ServingThreads::~ServingThreads() { stop(); }

void ServingThreads::start() {
  const std::lock_guard lock(mutex_);
  // One more, so that messages are taken while all jobs run.
  for (int64_t i = 0; i <= threads_; ++i) start_thread();
}

void ServingThreads::start_thread() {
  ++ticking_;  // until it says otherwise
  all_.emplace_back([this] {
    work();
    end_thread();
  });
  ::pthread_setname_np(all_.back().native_handle(), "trireme-remote");
}

bool ServingThreads::is_idle() const {
  const std::lock_guard lock(mutex_);
  return jobs_.empty() && in_jobs_ == 0;
}

bool ServingThreads::is_exhausted() const {
  const std::lock_guard lock(mutex_);
  return jobs_of_thread > 0 && in_jobs_ - running_ >= kMostWaiting;
}

void ServingThreads::run(Job job) {
  const std::lock_guard lock(mutex_);
  if (stopping_) return;
  jobs_.push_back(std::move(job));
  if (running_ < threads_) call_someone();
}

// Makes sure that a thread finds a new job.
void ServingThreads::call_someone() {
  const int64_t free = without_job();
  const bool may_start = static_cast<int64_t>(all_.size()) <= threads_ + kMostWaiting;
  const auto wanted = std::min(static_cast<int64_t>(jobs_.size()), threads_ - running_);
  // A thread that takes messages looks for jobs by itself, and so does one that ticks, but later.
  if (free < wanted && !stopping_ && may_start) start_thread();
  if (ticking_ + asleep_ > 0 && (!leads_ || wanted > 1 || drivers_ > 0)) changed_.notify_one();
  if (leads_ && drivers_ > 0) shm::ring(source_.futex());
}

void ServingThreads::stop() {
  std::list<std::thread> ended;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
    ended.swap(all_);
    ended.splice(ended.end(), ended_);
  }
  shm::ring(source_.futex());
  for (std::thread& thread : ended) thread.join();
}

void ServingThreads::leave() {
  std::unique_lock lock(mutex_);
  stopping_ = left_ = true;
  jobs_.clear();
  changed_.notify_all();
  shm::ring(source_.futex());
  changed_.wait_for(lock, kGrace, [this] { return in_jobs_ == 0; });
}

void ServingThreads::run_first(std::unique_lock<std::mutex>& lock) {
  {
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    ++running_;
    ++in_jobs_;
    if (may_run()) call_someone();
    // Some thread has to notice if this job takes long.
    if (ticking_ == 0 && asleep_ > 0) changed_.notify_one();
    lock.unlock();
    ++jobs_of_thread;
    job();
    --jobs_of_thread;
  }  // the job's captures are destroyed without the lock
  lock.lock();
  --running_;
  --in_jobs_;
  if (stopping_) changed_.notify_all();
}

// Ends this thread, and joins the one that ended before it, so that at most one is left to join. A
// join may take its time, since a language frees its thread state then.
void ServingThreads::end_this_thread(std::unique_lock<std::mutex>& lock) {
  const auto own = std::find_if(all_.begin(), all_.end(), [](const std::thread& thread) {
    return thread.get_id() == std::this_thread::get_id();
  });
  std::list<std::thread> before = std::exchange(ended_, {});
  ended_.splice(ended_.end(), all_, own);
  lock.unlock();
  for (std::thread& thread : before) thread.join();
}

void ServingThreads::lead(std::unique_lock<std::mutex>& lock) {
  leads_ = true;
  ++led_;
  lock.unlock();
  drive(
      [this] {
        const std::lock_guard still(mutex_);
        return stopping_ || may_run() || drivers_ > 0;
      },
      {}, /*interrupts=*/false);
  lock.lock();
  leads_ = false;
}

void ServingThreads::work() {
  std::unique_lock lock(mutex_);
  --ticking_;
  uint64_t seen = led_ - 1;
  for (int ticks = 0;;) {
    if (may_run()) {
      run_first(lock);
      ticks = 0;
      // This thread takes messages again at once, unless another thread has begun to.
      if (!leads_ && drivers_ == 0 && !may_run() && !stopping_) lead(lock);
      continue;
    }
    // At the end of a process a language's thread state may not be freed any more, so the thread
    // stays.
    if (left_) changed_.wait(lock, [] { return false; });
    if (stopping_) return;
    const bool nobody_takes = !leads_ && drivers_ == 0;
    if (nobody_takes && seen == led_) {
      lead(lock);
      ticks = 0;
      continue;
    }
    seen = led_;
    if (++ticks >= kTicks && without_job() > threads_ + 1) return end_this_thread(lock);
    if (ticks < kTicks || nobody_takes || drivers_ > 0) {
      ++ticking_;
      changed_.wait_for(lock, kTick);
      --ticking_;
    } else {
      ++asleep_;
      changed_.wait(lock);
      --asleep_;
      ticks = 0;
    }
  }
}

bool ServingThreads::wait(const std::function<bool()>& enough,
                          std::optional<Clock::time_point> until) {
  if (enough()) return true;
  const Pause pause(*this);
  struct Driver {
    explicit Driver(ServingThreads& threads) : threads(threads) {
      const std::lock_guard lock(threads.mutex_);
      ++threads.drivers_;
    }
    ~Driver() {
      const std::lock_guard lock(threads.mutex_);
      if (--threads.drivers_ == 0) ++threads.led_;
      if (threads.ticking_ == 0 && !threads.leads_ && threads.asleep_ > 0)
        threads.changed_.notify_one();
    }
    Driver(const Driver&) = delete;
    Driver& operator=(const Driver&) = delete;
    ServingThreads& threads;
  };
  const Driver driver(*this);
  return drive(enough, until, /*interrupts=*/true);
}

bool ServingThreads::rest(const std::function<bool()>& enough, Clock::time_point until) {
  for (shm::LookTimer signals; !enough();) {
    const Clock::time_point now = Clock::now();
    if (now >= until) return enough();
    look_if_due(now);
    signals.call_if_due(now, check_interruption);
    std::this_thread::sleep_for(kTick);
  }
  return true;
}

// Looks for ranks that have gone, unless some thread has done so lately. Threads take turns at
// taking messages, and if messages keep coming no turn is as long as the time between two looks.
void ServingThreads::look_if_due(Clock::time_point now) {
  Clock::rep due = look_at_;
  const Clock::rep next = (now + shm::kLookEvery).time_since_epoch().count();
  if (now.time_since_epoch().count() >= due && look_at_.compare_exchange_strong(due, next))
    source_.look();
}

// Takes messages until `enough` returns true; sleeps while none come.
template <typename Enough>
bool ServingThreads::drive(const Enough& enough, std::optional<Clock::time_point> until,
                           bool interrupts) {
  look_if_due(Clock::now());
  shm::LookTimer signals;
  const auto is_over = [&] {
    const Clock::time_point now = Clock::now();
    look_if_due(now);
    if (interrupts) signals.call_if_due(now, check_interruption);
    return until && now >= *until;
  };
  const auto look = [&] { return shm::found_after([this] { return source_.poll(); }, enough); };
  return shm::spin(shm::kLooksAwake, look) ||
         shm::FutexWait(source_.futex(), patience_).until(look, is_over) || enough();
}

}  // namespace trireme::remote
