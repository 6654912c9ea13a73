#include <trireme/comm/c10d/c10d_wait.h>

#include <trireme/comm/foreign_error.h>

#include <condition_variable>

namespace trireme {
namespace {

using std::chrono::milliseconds;

// A wait that goes well ends long before the first look at the board; after that the looks are as
// rare as a person can bear.
constexpr milliseconds kFirstLook{1000};
constexpr milliseconds kNextLook{250};
constexpr milliseconds kReportPatience{2000};

constexpr const char* kRebuild =
    "This group can no longer be used: end the program, or destroy the process group and "
    "initialise it again";

[[noreturn]] void throw_peer_failure(const std::string& operation, const std::string& announced,
                                     GroupHealth& health) {
  const std::string text =
      error_text("comm", operation + " was given up because a peer announced: " + announced,
                 health.where, kRebuild);
  health.set_failure(text);
  C10_THROW_ERROR(DistBackendError, text);
}

[[noreturn]] void throw_engine_failure(const std::string& operation, const std::string& cause,
                                       GroupHealth& health) {
  if (const auto announced = health.board.announced()) {
    throw_peer_failure(operation, *announced, health);
  }
  const std::string reports = health.board.exchange_reports(operation, kReportPatience);
  const std::string text =
      error_text("comm", operation + " failed: " + cause + ". " + reports, health.where, kRebuild);
  health.set_failure(text);
  C10_THROW_ERROR(DistBackendError, text);
}

// One bounded wait: true when the work is finished; throws what it failed of.
bool wait_slice(c10d::Work& work, milliseconds slice) {
  try {
    work.wait(slice);
    return true;
  } catch (const std::exception&) {
    // c10d says "Operation timed out!" by an exception too; only completion tells the two apart.
    if (!work.isCompleted()) return false;
  }
  work.wait(slice);  // it may have ended, and well, after it was given up: asked again it says so
  return true;
}

}  // namespace

std::optional<std::string> GroupHealth::failure() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

void GroupHealth::set_failure(const std::string& text) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!failure_) failure_ = text;
}

void GroupHealth::clear_failure() {
  const std::lock_guard<std::mutex> lock(mutex_);
  failure_.reset();
}

bool GroupHealth::is_look_due() {
  using Clock = std::chrono::steady_clock;
  const auto now = Clock::now().time_since_epoch();
  auto before = looked_at_.load(std::memory_order_relaxed);
  const bool is_due = now - Clock::duration(before) >= kFirstLook;
  return is_due && looked_at_.compare_exchange_strong(before, now.count());
}

void GroupHealth::check_usable(const std::string& operation) const {
  if (const auto earlier = failure()) {
    C10_THROW_ERROR(
        DistBackendError,
        error_text("comm", operation + " was not started: the group failed before: " + *earlier,
                   where, kRebuild));
  }
}

void rethrow_named(const std::string& operation, GroupHealth& health,
                   const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    if (health.failure()) throw;  // already in our words
    throw_engine_failure(operation, first_line_of(error), health);
  }
}

void wait_for_work(c10d::Work& work, bool on_cpu, const std::string& operation,
                   GroupHealth& health) {
  rethrow_named(operation, health, [&] {
    // Orders streams and returns; the engine's own watchdog holds the deadline. Until that bites, a
    // rank whose device waits in vain goes on to enqueue, and comes here.
    if (!on_cpu) {
      work.wait();
      if (!health.is_look_due()) return;
      if (const auto announced = health.board.announced()) {
        throw_peer_failure(operation, *announced, health);
      }
      return;
    }
    for (milliseconds slice = kFirstLook; !wait_slice(work, slice); slice = kNextLook) {
      if (const auto announced = health.board.announced()) {
        throw_peer_failure(operation, *announced, health);
      }
    }
  });
}

void wait_for_future(c10::ivalue::Future& future, const std::string& operation,
                     GroupHealth& health) {
  struct Signal {
    std::mutex mutex;
    std::condition_variable finished;
    bool done = false;
  };
  const auto signal = std::make_shared<Signal>();
  future.addCallback(
      [signal](c10::ivalue::Future&) {
        const std::lock_guard<std::mutex> lock(signal->mutex);
        signal->done = true;
        signal->finished.notify_all();
      },
      /*uses_future=*/false);
  for (milliseconds slice = kFirstLook;; slice = kNextLook) {
    std::unique_lock<std::mutex> lock(signal->mutex);
    if (signal->finished.wait_for(lock, slice, [&] { return signal->done; })) break;
    lock.unlock();
    if (const auto announced = health.board.announced()) {
      throw_peer_failure(operation, *announced, health);
    }
  }
  rethrow_named(operation, health,
                [&] { future.waitAndThrow(); });  // orders the caller's streams too
}

}  // namespace trireme
