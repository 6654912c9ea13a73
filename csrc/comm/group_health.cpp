#include <trireme/comm/group_health.h>

#include <c10/util/Exception.h>

#include <utility>

namespace trireme {

std::optional<std::string> GroupHealth::announced() const noexcept {
  auto words = board.announced();
  return words || !whole ? words : whole->announced();
}

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
  const bool is_due = now - Clock::duration(before) >= std::chrono::seconds(1);
  return is_due && looked_at_.compare_exchange_strong(before, now.count());
}

void GroupHealth::set_watch(const void* owner, Watch watch) {
  const std::lock_guard<std::mutex> lock(watch_mutex_);
  watches_[owner] = std::move(watch);
}

void GroupHealth::drop_watch(const void* owner) {
  const std::lock_guard<std::mutex> lock(watch_mutex_);
  watches_.erase(owner);
}

std::optional<std::string> GroupHealth::waits_in_vain() const {
  const std::lock_guard<std::mutex> lock(watch_mutex_);
  for (const auto& [owner, watch] : watches_)
    if (auto why = watch()) return why;
  return std::nullopt;
}

void GroupHealth::check_usable(const std::string& operation) const {
  if (const auto earlier = failure()) {
    C10_THROW_ERROR(
        DistBackendError,
        error_text("comm", operation + " was not started: the group failed before: " + *earlier,
                   where, kRebuildGroup));
  }
}

std::shared_ptr<GroupHealth> health_of(const Communicator& communicator) {
  auto health = communicator.health();
  return health ? health : std::make_shared<GroupHealth>(nullptr, communicator.rank_of());
}

}  // namespace trireme
