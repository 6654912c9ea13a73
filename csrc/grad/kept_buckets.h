#pragma once

#include <trireme/common/export.h>
#include <trireme/memory/bucket_plan.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace trireme {

// [Note: buckets under a communication hook]
//
// A hook may keep state by a bucket's index: errors of a compression, of the bucket's length. So
// the buckets that a hook has seen are kept as long as all their parameters are as they were
// planned: the tensor, how it lies, the dtype of its gradient. A parameter that was frozen keeps
// its place, which carries zeros. A bucket in which all are frozen is not sent, and comes back with
// any of them. A bucket of which a parameter was replaced or cast is given up: its remaining
// parameters, and new ones, go into buckets behind the others, with indices that no bucket has had
// before.
//
// The order of gradients is therefore learned before a hook sees its first bucket, whereas buckets
// without a hook change after the first backward.

// Buckets, and the index under which a communication hook knows each.
struct NumberedPlan {
  BucketPlan plan;
  std::vector<int64_t> numbers;

  void add(PlannedBucket bucket, int64_t number) {
    plan.buckets.push_back(std::move(bucket));
    numbers.push_back(number);
  }
};

// The buckets that a communication hook has seen.
class TRIREME_API KeptBuckets {
 public:
  // The present state of all parameters; plans index them.
  struct Present {
    const std::vector<at::Tensor>& tensors;
    const std::vector<ParameterInfo>& infos;
  };
  using Planner = std::function<BucketPlan(std::vector<int64_t> parameters)>;

  // Returns the kept buckets that hold any of `parameters`. Parameters in none of them are planned
  // by `plan_of` into buckets behind these, which are kept from now on.
  NumberedPlan plan(const std::vector<int64_t>& parameters, const Present& present,
                    const Planner& plan_of);

 private:
  struct Kept {
    PlannedBucket planned;
    int64_t number = 0;
    // The content of its slots when it was planned.
    std::vector<at::Tensor> tensors;
    std::vector<ParameterInfo> infos;
  };
  static bool follow(Kept& kept, const Present& present);
  void keep(const PlannedBucket& bucket, const Present& present);

  std::vector<Kept> kept_;  // in the order of their numbers
  int64_t next_number_ = 0;
};

}  // namespace trireme
