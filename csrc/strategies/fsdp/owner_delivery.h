#pragma once

#include <trireme/grad/backward_trigger.h>
#include <trireme/grad/grad_delivery.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace trireme {

// The part of a sum that this rank owns.
struct OwnSum {
  int64_t parameter = 0;
  at::Tensor values;    // in one row, in the dtype of the reduction; may be written to
  int64_t longest = 0;  // elements that any of the ranks has
};

// Returns what the hooks of register_hook() on a leaf make of its gradient: nothing accumulates
// into the leaf of a shard by way of autograd, which would call them.
TRIREME_API at::Tensor shown_to_hooks(const at::Tensor& leaf, at::Tensor gradient);

// The delivery of fully_shard: this rank's part of the average goes to an owner, a leaf over its
// shard, whose .grad it becomes, or is added to. The .grad of the parameter itself is what this
// rank contributes; it is undefined after the reduction. Sums may wait, with their rank, for a
// later backward that sums them up over the ranks that hold the same shards too.
//
// Values are one per parameter, and equal on all ranks. The public functions of a strategy take the
// reducer's lock. The thread that trains calls them.
class TRIREME_API OwnerDelivery final : public GradDelivery {
 public:
  struct Owners {
    OwnShards own;
    std::vector<at::Tensor> leaves;  // over this rank's shards
    bool has_replicas = false;       // whether other ranks hold the same shards
    // The dtypes of the .grad of leaves; each has its own if it is empty.
    std::vector<at::ScalarType> dtypes = {};
  };
  OwnerDelivery(std::shared_ptr<BackwardTrigger> trigger, Owners owners)
      : GradDelivery({.own_shards = owners.own, .may_replan = false}),
        trigger_(std::move(trigger)),
        owners_(std::move(owners)) {}

  // Excludes parameters from averaging: their gradients keep accumulating locally.
  void hold(const std::vector<bool>& held);
  // Holds sums back: they are neither summed up over replicas nor delivered to a .grad, but wait on
  // this rank, in the dtype of the reduction, for the first backward that does so. Does nothing
  // without replicas.
  void defer_all_reduce(const std::vector<bool>& deferred);
  // Sets what each parameter's sum is divided by in place of the divisor; 0 means the divisor.
  void set_divide_factors(std::vector<double> factors);
  // Shows `callback` the sums of `chosen` parameters before they become .grad: divided, in an order
  // equal on all ranks, as zeros where no rank used the parameter. It is called when backward is
  // over and nothing of this reducer is on its way any more: once per synchronized backward, and
  // once per bucket of gradients that its plan did not hold.
  using SummedCallback = std::function<void(const std::vector<OwnSum>& sums)>;
  void set_summed_callback(std::vector<bool> chosen, SummedCallback callback);
  // Forgets the gradients that this rank has accumulated, and sums that wait.
  void drop_accumulated();

  void begin(BucketLayout& layout) override;
  void accumulated(size_t parameter) override;
  bool has_unseen(size_t index) const override { return parameter(index).grad().defined(); }
  std::vector<bool> take_sums(Bucket& bucket) override;
  DeliveryTime delivery_time_of(size_t parameter) const override;
  bool show_sums(const Buckets& buckets) override;
  void deliver(Bucket& bucket, size_t slot) override;
  void restore(Bucket& /*bucket*/, size_t /*slot*/) override {}
  bool still_counts(size_t parameter, bool used) const override;
  void abandon(const std::vector<bool>& /*is_delivered*/) override { drop_accumulated(); }

 private:
  bool is_deferred(size_t index) const { return !deferred_.empty() && deferred_[index]; }
  bool is_chosen(size_t index) const { return summed_callback_ != nullptr && chosen_[index]; }
  double last_scale(size_t index) const;
  at::ScalarType dtype_of(size_t index) const;
  void add_own_sums(Bucket& bucket, std::vector<OwnSum>& sums) const;

  std::shared_ptr<BackwardTrigger> trigger_;
  Owners owners_;
  std::vector<double> divide_factors_;
  std::vector<bool> deferred_;            // see defer_all_reduce(); empty: none
  std::vector<at::Tensor> partial_sums_;  // what defer_all_reduce() holds back, by parameter
  std::vector<bool> chosen_;
  SummedCallback summed_callback_;
};

}  // namespace trireme
