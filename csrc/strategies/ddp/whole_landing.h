#pragma once

#include <trireme/grad/landing.h>

namespace trireme {

// Every rank keeps all of the average: it becomes the .grad of its parameter. See [Note: who owns a
// gradient's memory] in grad/bucket.h.
class TRIREME_API WholeLanding final : public Landing {
 public:
  // `as_bucket_view` replaces also a .grad that existed before, which otherwise keeps its identity.
  explicit WholeLanding(bool as_bucket_view = false) : as_bucket_view_(as_bucket_view) {}

  void begin_step(const Step& step) override { touches_gradients_ = step.touches_gradients; }
  void deliver(Bucket& bucket, size_t slot) override {
    if (touches_gradients_) bucket.deliver(slot, as_bucket_view_);
  }

 private:
  bool as_bucket_view_;
  bool touches_gradients_ = true;
};

}  // namespace trireme
