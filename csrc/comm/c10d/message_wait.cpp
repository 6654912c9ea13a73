#include <trireme/comm/c10d/message_wait.h>

#include <trireme/comm/c10d/c10d_wait.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace trireme {

// Shows a Work to the thread that looks around, as long as this lives.
class MessageWait::Watched {
 public:
  Watched(MessageWait& wait, c10d::Work& work, int64_t peer, Clock::time_point deadline)
      : wait_(wait) {
    const std::lock_guard lock(wait_.mutex_);
    wait_.work_ = &work;
    wait_.peer_ = peer;
    wait_.deadline_ = deadline;
    if (std::exchange(wait_.given_up_, nullptr) != &work)
      wait_.next_look_ = Clock::now() + kFirstLook;
    wait_.why_.clear();
    ++wait_.wait_;
    if (!wait_.thread_.joinable()) wait_.thread_ = std::thread([&wait] { wait.watch(); });
    wait_.changed_.notify_all();
  }
  ~Watched() {
    const std::lock_guard lock(wait_.mutex_);
    wait_.work_ = nullptr;
    wait_.changed_.notify_all();
  }
  Watched(const Watched&) = delete;
  Watched& operator=(const Watched&) = delete;

  // Called when the Work's wait was ended. Returns whether the message came in that moment; throws
  // unless it did, or the deadline has ended the wait.
  bool came_meanwhile(c10d::Work& work) const {
    const std::lock_guard lock(wait_.mutex_);
    if (wait_.why_.empty() && Clock::now() >= wait_.deadline_) {
      wait_.given_up_ = &work;
      return false;
    }
    if (wait_.connections_ && is_through(work)) return true;
    C10_THROW_ERROR(DistBackendError, wait_.why_.empty() ? "it was given up" : wait_.why_);
  }

 private:
  MessageWait& wait_;
};

MessageWait::~MessageWait() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

bool MessageWait::wait_until(c10d::Work& work, const AwaitedMessage& message,
                             Clock::time_point deadline) {
  if (!connections_) deadline = Clock::time_point::max();
  bool has_come = false;
  rethrow_named(message.operation, *health_, [&] {
    const Watched watched(*this, work, message.peer, deadline);
    has_come = work.wait() || watched.came_meanwhile(work);
  });
  return has_come;
}

void MessageWait::watch() {
  std::unique_lock lock(mutex_);
  while (!ending_) {
    changed_.wait(lock, [this] { return ending_ || work_ != nullptr; });
    const uint64_t wait = wait_;
    const auto is_over_by = [&](Clock::time_point time) {
      return changed_.wait_until(lock, time, [&] { return is_over(wait); });
    };
    while (!is_over_by(std::min(next_look_, deadline_))) {
      if (Clock::now() >= next_look_) {
        const int64_t peer = peer_;
        lock.unlock();
        std::string why = why_in_vain(peer);
        lock.lock();
        if (is_over(wait)) break;
        why_ = std::move(why);
        next_look_ = Clock::now() + kNextLook;
      }
      if (why_.empty() && Clock::now() < deadline_) continue;
      try {
        work_->abort();
      } catch (const std::exception&) {  // an engine that cannot: its own deadline ends the wait
      }
      changed_.wait(lock, [&] { return is_over(wait); });
      break;
    }
  }
}

// Returns why the message will not come or go; "" while it may.
std::string MessageWait::why_in_vain(int64_t peer) const {
  if (auto announced = health_->announced()) return *std::move(announced);
  return connections_ ? connections_->why_broken(peer) : std::string();
}

}  // namespace trireme
