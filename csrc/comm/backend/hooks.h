#pragma once

#include <trireme/shm/fault.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

namespace trireme {

// One operation that ended well.
struct ShmCompletion {
  uint64_t key;  // the Work's; never used again in this process
  c10d::OpType type;
  uint64_t sequence;  // collectives and messages are counted separately
  std::chrono::steady_clock::time_point started;
  std::chrono::steady_clock::time_point finished;
};

// The functions to call when an operation ends well, and before this rank raises that the group has
// ended. Hooks run on the thread that ran the operation, without a lock of the group's held; hooks
// of two operations may run at once. What they throw becomes a warning, once. Thread-safe.
//
// Abort hooks run once in the life of a group, in the order of their numbers, before any caller
// sees the error: threads that come meanwhile wait for them.
class ShmHooks {
 public:
  using AbortHook = std::function<void()>;
  using CompletionHook = std::function<void(const ShmCompletion&)>;

  void set_abort_hook(int64_t id, AbortHook hook);  // an empty hook removes it
  void set_completion_hook(int64_t id, CompletionHook hook);

  void completed(const ShmCompletion& completion) noexcept;
  bool hears_completions() const { return reports_.load(std::memory_order_relaxed); }
  // Records what a fault of an operation means for the group, and runs abort hooks if it ends it.
  void failed(const shm::Fault& fault) noexcept;
  void aborting() noexcept;
  c10d::ErrorType error() const { return error_.load(); }

 private:
  template <typename Hook>
  using Hooks = std::map<int64_t, std::shared_ptr<Hook>>;
  template <typename Hook, typename... Arguments>
  void run(const Hooks<Hook>& hooks, const Arguments&... arguments) noexcept;
  void run_abort_hooks() noexcept;

  std::mutex mutex_;
  Hooks<AbortHook> abort_hooks_;
  Hooks<CompletionHook> completion_hooks_;
  std::atomic<bool> reports_{false};  // whether there is a completion hook
  std::atomic<c10d::ErrorType> error_{c10d::ErrorType::SUCCESS};
  std::recursive_mutex once_;  // a hook may abort the group itself
  bool ran_ = false;
};

uint64_t next_completion_key();

}  // namespace trireme
