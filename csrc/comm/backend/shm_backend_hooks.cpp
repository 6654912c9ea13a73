// The hooks that are registered with the backend, and the state that it reports.

#include <trireme/comm/backend/shm_backend_class.h>

#include <limits>
#include <utility>

namespace trireme {
namespace {

// The number of registerOnCompletionHook's hook, which has none of its own.
constexpr int64_t kOnCompletion = std::numeric_limits<int64_t>::min();

}  // namespace

c10d::ErrorType ShmBackend::getError() {
  if (!uses_memory()) return inner_->getError();
  if (hooks_->error() == c10d::ErrorType::SUCCESS && group_->failure())
    return c10d::ErrorType::REMOTE_ERROR;  // no operation of this rank has met it yet
  return hooks_->error();
}

void ShmBackend::registerOnCompletionHook(
    std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  TORCH_CHECK_VALUE(uses_memory(), error_text("shm_backend", "Gloo reports no completions", where_,
                                              "Register no hook where no ranks share memory."));
  TORCH_CHECK_VALUE(onCompletionHook_ == nullptr,
                    error_text("shm_backend", "got a second hook for completions", where_,
                               "Call both from one."));
  onCompletionHook_ = std::move(hook);
  hooks_->set_completion_hook(
      kOnCompletion, [hook = onCompletionHook_](const ShmCompletion& completion) {
        hook(std::make_shared<c10d::WorkInfo>(completion.type, completion.sequence,
                                              completion.started, completion.finished,
                                              completion.finished - completion.started));
      });
}

void ShmBackend::waitForPendingWorks() {
  if (uses_memory() && !fork_guard_.in_child()) queue_.drain();
}

void ShmBackend::registerAbortHook(int64_t id, AbortHook hook) {
  hooks_->set_abort_hook(id, std::move(hook));
}

void ShmBackend::unregisterAbortHook(int64_t id) { hooks_->set_abort_hook(id, {}); }

void ShmBackend::registerCompletionHook(int64_t id, CompletionHook hook) {
  hooks_->set_completion_hook(id, [hook = std::move(hook)](const ShmCompletion& completion) {
    const std::chrono::duration<float, std::milli> duration =
        completion.finished - completion.started;
    hook({completion.key, duration.count()});
  });
}

void ShmBackend::unregisterCompletionHook(int64_t id) { hooks_->set_completion_hook(id, {}); }

}  // namespace trireme
