#include <trireme/strategies/pipeline/threads/call_turn.h>

#include <trireme/common/error.h>
#include <trireme/common/interruption.h>

#include <chrono>

namespace trireme {
namespace {

constexpr std::chrono::milliseconds kLookAround{50};

}  // namespace

void CallTurn::take(const PipelineRunner* runner) {
  if (runner != nullptr) runner->expect_call();
  std::unique_lock lock(mutex_);
  TORCH_CHECK(!is_taken_ || owner_ != std::this_thread::get_id(),
              error_text("pipeline", "got a call from within another one of the same thread", {},
                         "Call the pipeline when that has returned."));
  if (is_taken_ && ranks_) {
    const std::string text = error_text(
        "pipeline", "got a call during one of another thread, of a pipeline over ranks",
        ranks_->rank_of(),
        "Make all calls in one thread, or one after the other: their order is that of all ranks");
    ranks_->announce_failure(text);
    TORCH_CHECK(false, text);
  }
  while (is_taken_) {
    if (is_free_.wait_for(lock, kLookAround) == std::cv_status::no_timeout) continue;
    lock.unlock();
    check_interruption();
    lock.lock();
  }
  is_taken_ = true;
  owner_ = std::this_thread::get_id();
}

void CallTurn::give_back() noexcept {
  {
    const std::lock_guard lock(mutex_);
    is_taken_ = false;
    owner_ = {};
  }
  is_free_.notify_one();
}

}  // namespace trireme
