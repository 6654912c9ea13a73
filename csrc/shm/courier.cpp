#include <trireme/shm/courier.h>

#include <trireme/common/interruption.h>

#include <pthread.h>
#include <utility>

namespace trireme::shm {
namespace {

// How often the worker checks whether another thread moves the messages, so that a post() need not
// wake it; after kTicks checks without work it sleeps until it is woken.
constexpr std::chrono::milliseconds kTick{1};
constexpr int kTicks = 20;

}  // namespace

Courier::Courier(HostGroup& group)
    : group_(group),
      futex_(group.block(group.rank()).mail_futex),
      patience_(patience_of(group.world())),
      mailbox_(group) {}

Courier::~Courier() {
  if (!fork_guard_.in_child()) {
    close();
  } else if (worker_.joinable()) {
    // Detached, since the thread stayed with the parent, and so would a wait for the condition.
    worker_.detach();
    static_cast<void>(changed_.release());
  }
}

void Courier::post(const TransferPtr& transfer) {
  std::vector<TransferPtr> ended;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closing_) {
      throw Fault(FaultKind::kAborted, error_text("courier", "got a message after the group ended",
                                                  group_.where(), "Make another group."));
    }
    mailbox_.post(transfer);
    mailbox_.progress();
    ended = mailbox_.take_ended();
    if (!mailbox_.is_idle()) call_worker();
  }
  deliver(ended);
}

bool Courier::wait(const Transfer& transfer, std::optional<Clock::time_point> until) {
  if (transfer.is_done()) return true;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return transfer.is_done();
    ++drivers_;
  }
  const auto end = [this] {
    const std::lock_guard<std::mutex> lock(mutex_);
    --drivers_;
    if (closing_ || (worker_sleeps_ && !mailbox_.is_idle())) changed_->notify_all();
  };
  LookTimer signals;
  const auto is_over = [&] {
    const Clock::time_point now = Clock::now();
    signals.call_if_due(now, check_interruption);
    return until && now >= *until;
  };
  const auto is_done = [&] { return transfer.is_done(); };
  try {
    const auto look = [&] { return found_after([this] { return advance(); }, is_done); };
    if (!spin(kLooksAwake, look)) drive(is_done, is_over);
  } catch (...) {  // the waiting thread was interrupted; the transfer goes on
    end();
    throw;
  }
  end();
  return transfer.is_done();
}

void Courier::poll() { advance(); }

void Courier::close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(closing_, true)) return;
    changed_->notify_all();
  }
  withdraw(Transfer::Kind::kRecv, "the group ended before a message came");
  const Clock::time_point deadline = Clock::now() + kLinger;
  drive([&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    return !mailbox_.is_sending() || Clock::now() >= deadline;
  });
  withdraw(Transfer::Kind::kSend, "the group ended before a message was received");
  drive([&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    mailbox_.close();
    return !mailbox_.is_unfetched() || Clock::now() >= deadline;
  });
  {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_->wait(lock, [this] { return drivers_ == 0; });
    closed_ = true;
  }
  if (worker_.joinable()) worker_.join();
}

void Courier::withdraw(Transfer::Kind kind, const char* why) {
  std::vector<TransferPtr> ended;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    mailbox_.withdraw(kind, error_text("courier", why, group_.where(),
                                       "Wait for all messages before you end the group."));
    ended = mailbox_.take_ended();
  }
  deliver(ended);
  ring(futex_);
}

// Moves messages until `enough` or `is_over` returns true; sleeps while nothing moves.
template <typename Enough, typename IsOver>
void Courier::drive(const Enough& enough, const IsOver& is_over) {
  const auto look = [&] { return found_after([this] { return advance(); }, enough); };
  FutexWait(futex_, patience_).until(look, is_over);
}

bool Courier::advance() {
  std::vector<TransferPtr> ended;
  bool moved = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return false;
    moved = mailbox_.progress();
    if (const Clock::time_point now = Clock::now(); now >= next_look_) {
      next_look_ = now + kLookEvery;
      mailbox_.look();
    }
    ended = mailbox_.take_ended();
  }
  deliver(ended);
  return moved;
}

// Runs without the lock: callbacks may take other locks, post the next message, and wait for one
// that has ended together with theirs.
void Courier::deliver(const std::vector<TransferPtr>& ended) {
  for (const TransferPtr& transfer : ended) {
    if (transfer->on_done) transfer->on_done(*transfer);
    transfer->on_done = nullptr;  // it may hold what holds the transfer
    transfer->done.store(true, std::memory_order_seq_cst);
  }
  if (!ended.empty()) ring(futex_);
  for (const TransferPtr& transfer : ended)
    if (const auto call = std::exchange(transfer->after_done, nullptr)) call();
}

void Courier::call_worker() {
  if (!worker_.joinable()) {
    worker_ = std::thread([this] { work(); });
    ::pthread_setname_np(worker_.native_handle(), "trireme-mail");
  }
  if (worker_sleeps_) changed_->notify_all();
}

void Courier::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto is_mine = [this] { return drivers_ == 0 && !mailbox_.is_idle(); };
  for (int ticks = 0;;) {
    // A thread that has just posted a transfer is likely to wait for it itself.
    changed_->wait_for(lock, kTick, [this] { return closing_; });
    if (closing_) return;
    if (is_mine()) {
      lock.unlock();
      drive([&] {
        const std::lock_guard<std::mutex> still(mutex_);
        return closing_ || !is_mine();
      });
      lock.lock();
      ticks = 0;
    } else if (++ticks >= kTicks) {
      worker_sleeps_ = true;
      changed_->wait(lock, [&] { return closing_ || is_mine(); });
      worker_sleeps_ = false;
      ticks = 0;
    }
  }
}

}  // namespace trireme::shm
