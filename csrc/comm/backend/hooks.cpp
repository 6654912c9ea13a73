#include <trireme/comm/backend/hooks.h>

#include <c10/util/Exception.h>

#include <utility>

namespace trireme {

using c10d::ErrorType;

namespace {

template <typename Hooks, typename Hook>
void set(Hooks& hooks, int64_t id, Hook hook) {
  hooks.erase(id);
  if (hook) hooks.emplace(id, std::make_shared<Hook>(std::move(hook)));
}

}  // namespace

uint64_t next_completion_key() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

void ShmHooks::set_abort_hook(int64_t id, AbortHook hook) {
  const std::lock_guard<std::mutex> lock(mutex_);
  set(abort_hooks_, id, std::move(hook));
}

void ShmHooks::set_completion_hook(int64_t id, CompletionHook hook) {
  const std::lock_guard<std::mutex> lock(mutex_);
  set(completion_hooks_, id, std::move(hook));
  reports_.store(!completion_hooks_.empty());
}

// Calls a copy of the hooks: a hook may take the lock of Python, which a thread that sets another
// hook may hold.
template <typename Hook, typename... Arguments>
void ShmHooks::run(const Hooks<Hook>& hooks, const Arguments&... arguments) noexcept {
  try {
    std::unique_lock<std::mutex> lock(mutex_);
    const Hooks<Hook> copy = hooks;
    lock.unlock();
    for (const auto& [id, hook] : copy) {
      try {
        (*hook)(arguments...);
      } catch (const std::exception& error) {
        TORCH_WARN_ONCE("[shm_hooks] a hook of the process group threw: ", error.what(),
                        ". Catch it in the hook; the group goes on as without.");
      }
    }
  } catch (...) {  // no memory for the copy, or a warning that is an error
  }
}

void ShmHooks::completed(const ShmCompletion& completion) noexcept {
  if (hears_completions()) run(completion_hooks_, completion);
}

void ShmHooks::failed(const shm::Fault& fault) noexcept {
  ErrorType type = ErrorType::REMOTE_ERROR;
  switch (fault.kind()) {
    case shm::FaultKind::kTimeout:
      type = ErrorType::TIMEOUT;
      break;
    case shm::FaultKind::kPeerLost:
    case shm::FaultKind::kAborted:
      break;
    default:
      return;  // the group goes on
  }
  ErrorType none = ErrorType::SUCCESS;  // the first cause of the end counts
  error_.compare_exchange_strong(none, type);
  run_abort_hooks();
}

void ShmHooks::aborting() noexcept {
  ErrorType none = ErrorType::SUCCESS;
  error_.compare_exchange_strong(none, ErrorType::COMM_ERROR);
  run_abort_hooks();
}

void ShmHooks::run_abort_hooks() noexcept {
  const std::lock_guard<std::recursive_mutex> lock(once_);
  if (!std::exchange(ran_, true)) run(abort_hooks_);
}

}  // namespace trireme
