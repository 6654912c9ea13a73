#pragma once

#include <trireme/grad/backward_trigger.h>
#include <trireme/grad/grad_delivery.h>

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace trireme {

// The delivery of ZeRO 2: each rank keeps its shards of the average, as part of the .grad of the
// whole parameter, which is zeros elsewhere and takes no memory there. An earlier sum is set aside
// when a backward begins, is replaced by what this rank accumulates, and is added to the new sum.
//
// The public functions of a strategy take the reducer's lock. The thread that trains calls them.
class TRIREME_API ShardDelivery final : public GradDelivery {
 public:
  // `defers_sums` leaves the sums of gradients that go as a stream to visit_sums(): after backward
  // every .grad is undefined. Costs a ring that holds all gradients.
  ShardDelivery(std::shared_ptr<BackwardTrigger> trigger, OwnShards own, bool defers_sums = false)
      : GradDelivery(
            {.own_shards = std::move(own), .may_defer_sums = defers_sums, .may_replan = false}),
        trigger_(std::move(trigger)) {}

  // Returns the indices of gradients that are not as the reducer left them: changed in place,
  // replaced, or accumulated without synchronizing, since or before a further backward was added to
  // them. Neither `allowed` in-place writes to each nor zeros count as a change.
  std::vector<int64_t> changed_gradients(uint32_t allowed = 0) const;
  // Returns whether the last backward has left sums to be made; summed() returns of which
  // parameters: those that some rank used.
  bool has_sums() const { return has_sums_; }
  const std::vector<bool>& summed() const { return summed_; }
  // Makes these sums, once; `visit` sees those of summed() parameters. May wait for other ranks.
  void visit_sums(const SumVisitor& visit);
  // Makes these sums as .grad, as if they had not been deferred. Does nothing if there are none.
  void finalize_sums();
  // Makes the parts of each .grad that other ranks own zeros again, if they were written to.
  void keep_own_gradients();
  // Drops what was reduced but is not in .grad, because its sum was deferred, or a backward
  // accumulated on it without synchronizing.
  void drop_set_aside();

  void begin(BucketLayout& layout) override;
  void due(size_t parameter) override { set_aside(parameter); }
  void accumulated(size_t parameter) override;
  bool has_unseen(size_t parameter) const override;
  void before_backward() override;
  bool defers_step() const override;
  void begin_step(const Step& step) override;
  void deliver(Bucket& bucket, size_t slot) override;
  void restore(Bucket& bucket, size_t slot) override;
  void after_backward() override { has_sums_ = defers_; }
  void abandon(const std::vector<bool>& is_delivered) override;

 private:
  // A .grad as it was left, to see whether it is still the same tensor and unchanged.
  using WeakTensor = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;
  struct Watched {
    std::optional<WeakTensor> grad;
    uint32_t version = 0;

    static Watched of(const at::Tensor& tensor);
    bool is(const at::Tensor& tensor) const;
    bool is_unchanged(const at::Tensor& tensor, uint32_t allowed = 0) const;
  };
  void set_aside(size_t parameter);

  std::shared_ptr<BackwardTrigger> trigger_;
  Transport* transport_ = nullptr;  // the one of this step
  bool defers_ = false;             // this step
  bool has_sums_ = false;
  std::vector<bool> summed_;
  // values per parameter
  std::vector<Watched> delivered_as_;
  std::vector<Watched> accumulated_as_;  // in place of what was set aside
  std::vector<at::Tensor> set_aside_;
  std::vector<bool> was_changed_;  // what was set aside, or is in .grad since a backward was lost
};

}  // namespace trireme
