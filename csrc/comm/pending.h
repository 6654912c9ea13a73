#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace trireme {

// A collective in flight. Move-only; dropping it does not cancel the collective (no c10d engine
// can), but gives up its result. Not thread-safe: one thread waits.
class TRIREME_API Pending {
 public:
  using Clock = std::chrono::steady_clock;

  // The part that an engine implements. `wait` returns when the tensors may be read on the caller's
  // thread (CPU) or by work enqueued on the caller's current stream (CUDA); it throws
  // c10::DistBackendError naming the operation when the operation failed.
  struct State {
    virtual ~State() = default;
    virtual bool done() const = 0;
    virtual void wait() = 0;
    // Waits for `patience` at most: returns whether it has waited to the end. An engine that can
    // only wait to the end does so.
    virtual bool wait_for(std::chrono::milliseconds /*patience*/) {
      wait();
      return true;
    }
    // Returns the tensors that carry the result, where they are not the ones passed in (a
    // communication hook).
    virtual std::vector<at::Tensor> result() { return {}; }
    // Returns when the engine finished, if it tells.
    virtual std::optional<Clock::time_point> finished_at() const { return std::nullopt; }
  };

  Pending() = default;  // nothing in flight: done, waits for nothing
  explicit Pending(std::unique_ptr<State> state) : state_(std::move(state)) {}

  bool done() const { return state_ == nullptr || state_->done(); }
  void wait() {
    if (state_ != nullptr) state_->wait();
  }
  bool wait_for(std::chrono::milliseconds patience) {
    return state_ == nullptr || state_->wait_for(patience);
  }
  // Returns whether it is done before `patience` is over. Looks now and then; wait() must still
  // follow.
  bool comes_within(Clock::duration patience) const;
  std::vector<at::Tensor> result() {
    return state_ == nullptr ? std::vector<at::Tensor>{} : state_->result();
  }
  std::optional<Clock::time_point> finished_at() const {
    return state_ == nullptr ? std::nullopt : state_->finished_at();
  }

 private:
  std::unique_ptr<State> state_;
};

}  // namespace trireme
