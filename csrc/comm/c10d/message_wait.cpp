#include <trireme/comm/c10d/message_wait.h>

#include <trireme/comm/c10d/c10d_wait.h>

#include <exception>

namespace trireme {

// Shows a Work to the thread that looks at the board, as long as this lives.
class MessageWait::Watched {
 public:
  Watched(MessageWait& wait, c10d::Work& work) : wait_(wait) {
    const std::lock_guard lock(wait_.mutex_);
    wait_.work_ = &work;
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

void MessageWait::wait(c10d::Work& work, const std::string& operation) {
  rethrow_named(operation, *health_, [&] {
    const Watched watched(*this, work);
    if (work.wait()) return;
    // The watch has ended the wait; rethrow_named() reports the peer's announcement.
    C10_THROW_ERROR(DistBackendError, "it was given up");
  });
}

void MessageWait::watch() {
  std::unique_lock lock(mutex_);
  while (!ending_) {
    changed_.wait(lock, [this] { return ending_ || work_ != nullptr; });
    const uint64_t wait = wait_;
    const auto is_over_within = [&](auto patience) {
      return changed_.wait_for(lock, patience, [&] { return is_over(wait); });
    };
    for (auto patience = kFirstLook; !is_over_within(patience); patience = kNextLook) {
      lock.unlock();
      const bool has_announced = health_->announced().has_value();
      lock.lock();
      if (!has_announced || is_over(wait)) continue;
      try {
        work_->abort();
      } catch (const std::exception&) {  // an engine that cannot: its own deadline ends the wait
      }
      changed_.wait(lock, [&] { return is_over(wait); });
      break;
    }
  }
}

}  // namespace trireme
