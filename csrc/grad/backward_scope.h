#pragma once

#include <trireme/grad/grad_reducer.h>

#include <memory>
#include <utility>

namespace trireme {

// Lives in the end callback of one armed backward. Autograd destroys the callback without calling
// it when an exception leaves that backward; this is how the reducer, and through it the other
// ranks, learn of it.
class BackwardScope {
 public:
  explicit BackwardScope(std::shared_ptr<GradReducer> reducer) : reducer_(std::move(reducer)) {}
  ~BackwardScope() {
    if (!finished_) reducer_->abandon_backward();
  }
  BackwardScope(const BackwardScope&) = delete;
  BackwardScope& operator=(const BackwardScope&) = delete;

  void finish() {
    reducer_->finish_backward();
    finished_ = true;
  }

 private:
  std::shared_ptr<GradReducer> reducer_;
  bool finished_ = false;
};

}  // namespace trireme
