#include <trireme/grad/kept_buckets.h>

#include <algorithm>

// See [Note: buckets under a communication hook] in kept_buckets.h.

namespace trireme {
namespace {

bool are_alike(const ParameterInfo& a, const ParameterInfo& b) {
  return a.sizes == b.sizes && a.strides == b.strides && a.dtype == b.dtype &&
         a.gradient_dtype() == b.gradient_dtype() && a.device == b.device &&
         a.sparse_gradient == b.sparse_gradient;
}

}  // namespace

// Returns whether a bucket still holds its planned parameters; then updates its plan to the places
// that these have now.
bool KeptBuckets::follow(Kept& kept, const Present& present) {
  for (size_t i = 0; i < kept.tensors.size(); ++i) {
    const auto found =
        std::find_if(present.tensors.begin(), present.tensors.end(),
                     [&](const at::Tensor& tensor) { return tensor.is_same(kept.tensors[i]); });
    if (found == present.tensors.end()) return false;
    const auto index = found - present.tensors.begin();
    if (!are_alike(present.infos[static_cast<size_t>(index)], kept.infos[i])) return false;
    kept.planned.slots[i].parameter = index;
  }
  return true;
}

void KeptBuckets::keep(const PlannedBucket& bucket, const Present& present) {
  Kept kept{bucket, next_number_++, {}, {}};
  for (const BucketSlot& slot : bucket.slots) {
    kept.tensors.push_back(present.tensors[static_cast<size_t>(slot.parameter)]);
    kept.infos.push_back(present.infos[static_cast<size_t>(slot.parameter)]);
  }
  kept_.push_back(std::move(kept));
}

NumberedPlan KeptBuckets::plan(const std::vector<int64_t>& parameters, const Present& present,
                               const Planner& plan_of) {
  std::erase_if(kept_, [&](Kept& kept) { return !follow(kept, present); });
  std::vector<bool> is_wanted(present.tensors.size(), false);
  for (const int64_t index : parameters) is_wanted[static_cast<size_t>(index)] = true;
  const auto holds_wanted = [&](const PlannedBucket& bucket) {
    return std::any_of(bucket.slots.begin(), bucket.slots.end(), [&](const BucketSlot& slot) {
      return is_wanted[static_cast<size_t>(slot.parameter)];
    });
  };
  NumberedPlan all;
  for (const Kept& kept : kept_)
    if (holds_wanted(kept.planned)) all.add(kept.planned, kept.number);
  for (const Kept& kept : kept_)
    for (const BucketSlot& slot : kept.planned.slots)
      is_wanted[static_cast<size_t>(slot.parameter)] = false;
  std::vector<int64_t> others = parameters;
  std::erase_if(others, [&](int64_t index) { return !is_wanted[static_cast<size_t>(index)]; });
  for (PlannedBucket& bucket : plan_of(std::move(others)).buckets) {
    keep(bucket, present);
    all.add(std::move(bucket), kept_.back().number);
  }
  return all;
}

}  // namespace trireme
