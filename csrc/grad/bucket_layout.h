#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/grad/arrival_order.h>
#include <trireme/grad/bucket.h>
#include <trireme/grad/kept_buckets.h>
#include <trireme/grad/transport.h>
#include <trireme/grad/used_map.h>
#include <trireme/memory/bucket_plan.h>
#include <trireme/memory/buffer_pool.h>
#include <trireme/module/module_parameters.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

TRIREME_API std::vector<ParameterInfo> describe_parameters(const NamedParameters& parameters);

// Return whether a parameter still lies in memory, and has gradients in the dtype, as it was
// described.
TRIREME_API bool lies_as_described(const at::Tensor& parameter, const ParameterInfo& info);
TRIREME_API bool has_described_dtypes(const at::Tensor& parameter, const ParameterInfo& info);

// The place of a parameter's gradient in the buckets of the step.
struct BucketPlace {
  int32_t bucket = -1;
  int32_t slot = -1;

  bool is_planned() const { return bucket >= 0; }
};

// The parameters, the plan of their buckets, these buckets, and the used-map: which gradients share
// a bucket, and where each lies. It is the same on all ranks. Not thread-safe; its reducer
// serialises access.
class TRIREME_API BucketLayout {
 public:
  struct Options {
    BucketCaps caps;
    // The dtype of floating-point gradients on the wire; that of the parameters if absent.
    std::optional<at::ScalarType> reduce_dtype;
    // The dtype of each parameter's gradient on the wire; see ParameterInfo. Empty: as above.
    std::vector<std::optional<at::ScalarType>> reduce_dtypes;
    // The beginning of each bucket's name, by which ranks notice that they came to reducers in
    // different orders, even if parameters have the same names.
    std::string bucket_prefix;
    OwnShards own;
  };
  // Takes the device of runs from the first parameter.
  BucketLayout(Options options, const NamedParameters& parameters);

  // Starts anew with these parameters. There are no buckets until build().
  void begin(const NamedParameters& parameters, int64_t step);

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  // Returns whether `tensor` is one of the parameters.
  bool has(const at::Tensor& tensor) const;
  std::vector<ParameterInfo>& infos() { return infos_; }
  const std::vector<ParameterInfo>& infos() const { return infos_; }
  c10::Device device() const { return infos_.front().device; }
  // Returns the used-map, which counts from the last synchronization on.
  UsedMap& used() { return used_; }
  const UsedMap& used() const { return used_; }
  ArrivalOrder& arrivals() { return arrivals_; }
  const ArrivalOrder& arrivals() const { return arrivals_; }

  // Makes plan and buckets anew if they are stale. Gradients that lie in an earlier bucket move.
  struct Transport {
    bool has_stream = false;    // gradients go one by one if the plan allows it
    bool carries_tail = false;  // the used-map may ride behind the last bucket's gradients
    bool takes_runs = true;     // buckets may be reduce_scattered
  };
  void build(const Transport& transport);
  void make_stale() { is_stale_ = true; }

  const BucketPlan& plan() const { return plan_; }
  Buckets& buckets() { return buckets_; }
  const std::vector<std::string>& labels() const { return labels_; }
  // Returns the index under which a communication hook knows a bucket.
  int64_t number_of(size_t bucket) const { return numbers_[bucket]; }
  BucketPlace place_of(size_t parameter) const { return places_[parameter]; }
  // Returns whether the used-map rides behind the last bucket's gradients.
  bool carries_tail() const { return carries_tail_; }
  // Returns whether buckets are reduce_scattered.
  bool scatters() const { return scatters_; }
  BufferPool* pool() { return pool_.get(); }

  // Makes the parameters' slots hold zeros in this step; see Bucket::leave_empty().
  void leave_out(size_t parameter);
  // Leaves parameters out of plans: their gradients keep accumulating on each rank. One flag per
  // parameter, equal on all ranks.
  void exclude(const std::vector<bool>& parameters);
  bool is_excluded(size_t parameter) const { return excluded_[parameter]; }

  // The order in which gradients are expected; parameters that are not in it get no bucket.
  const std::vector<int64_t>& order() const { return order_; }
  void set_order(std::vector<int64_t> order);
  // Keeps buckets from now on; see [Note: buckets under a communication hook].
  void keep_buckets();
  // Moves parameters that some rank left unused in the last step to trailing buckets, and back. The
  // map is the same on all ranks, so all come to the same plan without communication.
  void update_trailing(int64_t step, int64_t world);

  // Plans these parameters, which the plan of the step lacks, by themselves: into the buckets that
  // they will have, if buckets are kept. make_bucket() makes a bucket for such gradients.
  NumberedPlan plan_beside(const std::vector<int64_t>& parameters) {
    return plan_from(plan_.buckets.size(), parameters);
  }
  std::unique_ptr<Bucket> make_bucket(const PlannedBucket& planned) const {
    return make_bucket(planned, /*tail_numel=*/0, may_scatter());
  }

 private:
  BucketPlan plan_of(std::vector<int64_t> parameters) const;
  NumberedPlan plan_from(size_t first_number, const std::vector<int64_t>& parameters);
  std::unique_ptr<Bucket> make_bucket(const PlannedBucket& planned, int64_t tail_numel,
                                      bool scatters) const;
  Bucket* bucket_before(const PlannedBucket& planned) const;
  Buckets make_buckets(const BucketPlan& plan, int64_t tail_numel, bool scatters);
  std::vector<BucketPlace> places_in(const BucketPlan& plan) const;
  // Under the other placements some ranks own all of a gradient, and runs would be mostly padding.
  bool may_scatter() const {
    return takes_runs_ && options_.own && options_.own.plan->placement == ShardPlacement::kDim0;
  }

  Options options_;
  std::vector<at::Tensor> parameters_;
  std::vector<ParameterInfo> infos_;
  UsedMap used_{0};
  ArrivalOrder arrivals_;
  std::shared_ptr<BufferPool> pool_;  // null unless buckets may be reduce_scattered
  std::vector<int64_t> order_;
  std::vector<bool> trailing_;
  std::vector<int64_t> partly_used_at_;  // last step in which some rank left it unused
  std::vector<bool> excluded_;
  BucketPlan plan_;
  std::vector<int64_t> numbers_;     // one per bucket
  std::optional<KeptBuckets> kept_;  // if buckets are kept
  std::vector<BucketPlace> places_;
  Buckets buckets_;
  std::vector<std::string> labels_;
  bool carries_tail_ = false;
  bool takes_runs_ = true;
  bool scatters_ = false;
  bool is_stale_ = true;
};

}  // namespace trireme
