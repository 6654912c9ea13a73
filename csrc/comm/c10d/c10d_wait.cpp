#include <trireme/comm/c10d/c10d_wait.h>

#include <trireme/common/exception_text.h>

#include <condition_variable>

namespace trireme {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kReportPatience{2000};

[[noreturn]] void throw_peer_failure(const std::string& operation, const std::string& announced,
                                     GroupHealth& health) {
  const std::string text =
      error_text("comm", operation + " was given up because a peer announced: " + announced,
                 health.where, kRebuildGroup);
  health.set_failure(text);
  C10_THROW_ERROR(DistBackendError, text);
}

// Removes the place in the engine's source that it puts before its message, and its advice, which
// knows less than the ranks' own messages.
std::string without_frills(std::string cause) {
  if (const size_t end = cause.find("] "); cause.starts_with('[') && end != std::string::npos)
    cause.erase(0, end + 2);
  return cause.substr(0, cause.find(". This is typically caused by"));
}

[[noreturn]] void throw_engine_failure(const std::string& operation, const std::string& cause,
                                       GroupHealth& health) {
  if (const auto announced = health.announced()) {
    throw_peer_failure(operation, *announced, health);
  }
  const FaultBoard::Others others = health.board.ask_others(operation, kReportPatience);
  const std::string next_step =
      (others.all_left_normally ? kFewerBatches : "") + std::string(kRebuildGroup);
  const std::string text = error_text(
      "comm",
      operation + " failed: " + (others.text.empty() ? "" : others.text + ". ") + "This rank " +
          health.board.own_report(operation) + ". The engine says: " + without_frills(cause),
      health.where, next_step);
  health.set_failure(text);
  C10_THROW_ERROR(DistBackendError, text);
}

// Throws if the board shows that a peer has failed, or that this wait has no end.
void look_around(const std::string& operation, GroupHealth& health) {
  if (const auto announced = health.announced()) throw_peer_failure(operation, *announced, health);
  if (const auto why = health.waits_in_vain()) {
    health.set_failure(*why);
    C10_THROW_ERROR(DistBackendError, *why);
  }
}

// Looks around while the operation is not done: throws, too, if the engine says that a peer is
// lost.
void look_around_while_pending(const std::string& operation, GroupHealth& health) {
  look_around(operation, health);
  if (!health.find_lost_peer) return;
  if (const std::string lost = health.find_lost_peer(); !lost.empty())
    throw_engine_failure(operation, lost, health);
}

// Waits for at most that long: returns true when the work is finished, throws its error.
bool wait_slice(c10d::Work& work, milliseconds slice) {
  try {
    work.wait(slice);
    return true;
  } catch (const std::exception&) {
    // c10d says "Operation timed out!" by an exception too; only completion tells the two apart.
    if (!work.isCompleted()) return false;
  }
  work.wait(slice);  // asked again, a work that ended well after it was given up says so
  return true;
}

}  // namespace

void rethrow_named(const std::string& operation, GroupHealth& health,
                   const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    if (health.failure()) throw;  // already in our words
    throw_engine_failure(operation, first_line_of(error), health);
  }
}

void wait_for_work(c10d::Work& work, bool on_cpu, const AwaitedOperation& operation,
                   GroupHealth& health) {
  rethrow_named(operation.name, health, [&] {
    // Orders streams and returns; the engine's own watchdog holds the deadline. Until that acts, a
    // rank whose device waits in vain goes on to enqueue, and comes here.
    if (!on_cpu) {
      work.wait();
      if (health.is_look_due()) look_around(operation.name, health);
      return;
    }
    WaitInProgress wait(health.progress(), operation.number);
    for (milliseconds slice = kFirstLook; !wait_slice(work, slice); slice = kNextLook) {
      wait.takes_long(operation.name);
      look_around_while_pending(operation.name, health);
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
    look_around_while_pending(operation, health);
  }
  rethrow_named(operation, health,
                [&] { future.waitAndThrow(); });  // orders the caller's streams too
}

}  // namespace trireme
