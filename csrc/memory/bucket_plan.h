#pragma once

#include <trireme/common/export.h>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

// One parameter as a plan sees it. The `index` of a parameter is its place in the list of all of
// them, the same on every rank.
struct ParameterInfo {
  std::string name;  // fully qualified, as state_dict has it
  std::vector<int64_t> sizes;
  int64_t numel = 0;
  at::ScalarType dtype = at::kFloat;
  c10::Device device{c10::kCPU};
  bool sparse_gradient = false;
  bool requires_grad = true;
  // The dtype of its gradient on the wire; gradient_dtype() if absent.
  std::optional<at::ScalarType> reduce_dtype = {};
  // The strides, if it lies in memory in another order than row by row (channels_last): its
  // gradients lie, and travel, in the same order.
  std::vector<int64_t> strides = {};
  // The dtype of its .grad, if that is not its own (Tensor.grad_dtype).
  std::optional<at::ScalarType> grad_dtype = {};

  at::ScalarType gradient_dtype() const { return grad_dtype.value_or(dtype); }
};

// Elements [offset, offset + numel) of a bucket's buffer, which hold the gradient of `parameter`.
struct BucketSlot {
  int64_t parameter = 0;
  int64_t offset = 0;
  int64_t numel = 0;

  bool operator==(const BucketSlot&) const = default;
};

// Gradients that travel in one collective: one dtype, one device; a sparse gradient travels alone.
struct PlannedBucket {
  at::ScalarType dtype = at::kFloat;
  c10::Device device{c10::kCPU};
  bool sparse = false;
  int64_t numel = 0;
  std::vector<BucketSlot> slots;

  TRIREME_API int64_t bytes() const;
  bool operator==(const PlannedBucket&) const = default;
};

// Which parameters share a bucket and in which order buckets are launched. It is a value: equal on
// all ranks, or a collective is about to go wrong.
struct BucketPlan {
  std::vector<PlannedBucket> buckets;  // in launch order

  bool operator==(const BucketPlan&) const = default;
};

// torch's defaults: the first bucket is small, so that communication begins early.
inline constexpr int64_t kFirstBucketBytes = int64_t{1} << 20;
inline constexpr int64_t kBucketBytes = int64_t{25} << 20;

struct BucketCaps {
  // The bytes at which bucket 0, 1, ... of a dtype and device is full; the last entry holds for all
  // further buckets. A bucket is closed by the parameter that reaches its cap, as in torch, so it
  // may exceed it by less than that parameter.
  std::vector<int64_t> bytes;
};

struct BucketPlanRequest {
  const std::vector<ParameterInfo>& parameters;
  // Indices in the order in which gradients are expected; parameters that are left out get no
  // bucket.
  std::vector<int64_t> order;
  // One flag per parameter: whether it is planned into buckets after all others, because its
  // gradient may not come.
  std::vector<bool> trailing;
  BucketCaps caps;
  // The dtype of floating-point buckets on the wire; that of their parameters if absent.
  std::optional<at::ScalarType> reduce_dtype;
};

TRIREME_API BucketPlan make_bucket_plan(const BucketPlanRequest& request);

// Returns one line per bucket: dtype, device, bytes and the first and last parameter, e.g.
//   bucket 0: 1049600 bytes Float cpu, 12 gradients: head.weight .. block.7.fc2.bias
TRIREME_API std::string to_string(const BucketPlan& plan,
                                  const std::vector<ParameterInfo>& parameters);

// Returns "bucket 3: head.weight .. block.7.fc2.bias", for errors and traces.
TRIREME_API std::string bucket_label(const BucketPlan& plan, size_t bucket,
                                     const std::vector<ParameterInfo>& parameters);

}  // namespace trireme
