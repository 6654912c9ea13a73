#include <trireme/comm/c10d/comm_hook.h>

#include <trireme/comm/c10d/c10d_wait.h>

#include <utility>

namespace trireme {
namespace {

class HookState final : public Pending::State {
 public:
  HookState(std::shared_ptr<c10d::CommHookInterface> hook,
            c10::intrusive_ptr<c10::ivalue::Future> future, std::shared_ptr<GroupHealth> health,
            std::string operation)
      : hook_(std::move(hook)),
        future_(std::move(future)),
        health_(std::move(health)),
        operation_(std::move(operation)) {}

  bool done() const override { return future_->completed(); }

  void wait() override {
    if (!result_.empty()) return;
    wait_for_future(*future_, operation_, *health_);
    result_.push_back(hook_->parseHookResult(future_->value()));
  }

  std::vector<at::Tensor> result() override { return result_; }

 private:
  std::shared_ptr<c10d::CommHookInterface> hook_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::shared_ptr<GroupHealth> health_;
  std::string operation_;
  std::vector<at::Tensor> result_;
};

class C10dCommHook final : public CommHook {
 public:
  C10dCommHook(std::shared_ptr<c10d::CommHookInterface> hook, std::shared_ptr<GroupHealth> health)
      : hook_(std::move(hook)), health_(std::move(health)) {}

  Pending run(HookBucket bucket, const std::string& label) override {
    const std::string operation = "communication hook on " + label;
    health_->check_usable(operation);
    health_->board.note_started(operation);
    c10d::GradBucket grad_bucket(bucket.index, bucket.bucket_count, std::move(bucket.buffer),
                                 std::move(bucket.offsets), std::move(bucket.lengths),
                                 std::move(bucket.sizes), std::move(bucket.parameters),
                                 std::nullopt);
    auto future = hook_->runHook(grad_bucket);
    return Pending(std::make_unique<HookState>(hook_, std::move(future), health_, operation));
  }

 private:
  std::shared_ptr<c10d::CommHookInterface> hook_;
  std::shared_ptr<GroupHealth> health_;
};

}  // namespace

std::shared_ptr<CommHook> make_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook,
                                         std::shared_ptr<Communicator> group) {
  return std::make_shared<C10dCommHook>(std::move(hook), health_of(*group));
}

}  // namespace trireme
