#include <trireme/grad/bucket_layout.h>

#include <trireme/grad/flat_bucket.h>
#include <trireme/grad/run_bucket.h>
#include <trireme/grad/sparse_bucket.h>
#include <trireme/grad/stream_transport.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace trireme {
namespace {

// How many synchronized steps a parameter that some rank left unused stays in a trailing bucket, so
// that one that is used every other step does not move the buckets every step.
constexpr int64_t kTrailingSteps = 8;

// Returns whether a tensor is dense but does not lie row by row.
bool lies_in_other_order(const at::Tensor& tensor) {
  return !tensor.is_contiguous() && tensor.is_non_overlapping_and_dense();
}

// Returns the dtype of a tensor's gradients: its own if it takes any.
at::ScalarType gradient_dtype_of(const at::Tensor& tensor) {
  return tensor.grad_dtype().value_or(tensor.scalar_type());
}

}  // namespace

bool lies_as_described(const at::Tensor& parameter, const ParameterInfo& info) {
  if (info.strides.empty()) return !lies_in_other_order(parameter);
  return parameter.strides() == at::IntArrayRef(info.strides);
}

bool has_described_dtypes(const at::Tensor& parameter, const ParameterInfo& info) {
  return parameter.scalar_type() == info.dtype &&
         gradient_dtype_of(parameter) == info.gradient_dtype();
}

std::vector<ParameterInfo> describe_parameters(const NamedParameters& parameters) {
  std::vector<ParameterInfo> infos;
  for (size_t i = 0; i < parameters.tensors.size(); ++i) {
    const at::Tensor& tensor = parameters.tensors[i];
    infos.push_back({parameters.names[i], tensor.sizes().vec(), tensor.numel(),
                     tensor.scalar_type(), tensor.device(), parameters.sparse_gradient[i],
                     tensor.requires_grad()});
    ParameterInfo& info = infos.back();
    if (lies_in_other_order(tensor)) info.strides = tensor.strides().vec();
    if (gradient_dtype_of(tensor) != info.dtype) info.grad_dtype = gradient_dtype_of(tensor);
  }
  return infos;
}

BucketLayout::BucketLayout(Options options, const NamedParameters& parameters)
    : options_(std::move(options)) {
  if (may_scatter()) pool_ = std::make_shared<BufferPool>(parameters.tensors.front().device());
}

void BucketLayout::begin(const NamedParameters& parameters, int64_t step) {
  const size_t count = parameters.tensors.size();
  buckets_.clear();
  places_.assign(count, {});
  plan_ = {};
  numbers_.clear();
  parameters_ = parameters.tensors;
  infos_ = describe_parameters(parameters);
  for (size_t i = 0; i < options_.reduce_dtypes.size(); ++i)
    infos_[i].reduce_dtype = options_.reduce_dtypes[i];
  trailing_.assign(count, false);
  partly_used_at_.assign(count, step - kTrailingSteps);
  excluded_.assign(count, false);
  used_ = UsedMap(static_cast<int64_t>(count));
  arrivals_.begin(count);
  order_.clear();
  // The parameter registered last gets its gradient first: the guess until an order was seen.
  for (size_t i = count; i-- > 0;)
    if (infos_[i].requires_grad) order_.push_back(static_cast<int64_t>(i));
  is_stale_ = true;
}

bool BucketLayout::has(const at::Tensor& tensor) const {
  return std::any_of(parameters_.begin(), parameters_.end(),
                     [&](const at::Tensor& parameter) { return parameter.is_same(tensor); });
}

BucketPlan BucketLayout::plan_of(std::vector<int64_t> parameters) const {
  std::erase_if(parameters,
                [this](int64_t index) { return is_excluded(static_cast<size_t>(index)); });
  return make_bucket_plan(
      {infos_, std::move(parameters), trailing_, options_.caps, options_.reduce_dtype});
}

NumberedPlan BucketLayout::plan_from(size_t first_number, const std::vector<int64_t>& parameters) {
  const auto plan_them = [this](std::vector<int64_t> some) { return plan_of(std::move(some)); };
  if (kept_) return kept_->plan(parameters, {parameters_, infos_}, plan_them);
  NumberedPlan numbered{plan_of(parameters), {}};
  for (size_t b = 0; b < numbered.plan.buckets.size(); ++b)
    numbered.numbers.push_back(static_cast<int64_t>(first_number + b));
  return numbered;
}

std::vector<BucketPlace> BucketLayout::places_in(const BucketPlan& plan) const {
  std::vector<BucketPlace> places(parameters_.size());
  for (size_t b = 0; b < plan.buckets.size(); ++b) {
    const std::vector<BucketSlot>& slots = plan.buckets[b].slots;
    for (size_t slot = 0; slot < slots.size(); ++slot)
      places[static_cast<size_t>(slots[slot].parameter)] = {static_cast<int32_t>(b),
                                                            static_cast<int32_t>(slot)};
  }
  return places;
}

std::unique_ptr<Bucket> BucketLayout::make_bucket(const PlannedBucket& planned, int64_t tail_numel,
                                                  bool scatters) const {
  if (planned.sparse) return std::make_unique<SparseBucket>(planned, parameters_, infos_);
  if (scatters)
    return std::make_unique<RunBucket>(planned, parameters_, infos_, options_.own, pool_);
  return std::make_unique<FlatBucket>(planned, parameters_, infos_, tail_numel, options_.own);
}

// Returns the present bucket of the first gradient of a planned one; null if it is in none.
Bucket* BucketLayout::bucket_before(const PlannedBucket& planned) const {
  if (planned.slots.empty()) return nullptr;
  const BucketPlace place = places_[static_cast<size_t>(planned.slots.front().parameter)];
  return place.is_planned() ? buckets_[static_cast<size_t>(place.bucket)].get() : nullptr;
}

Buckets BucketLayout::make_buckets(const BucketPlan& plan, int64_t tail_numel, bool scatters) {
  Buckets buckets;
  for (const PlannedBucket& planned : plan.buckets) {
    const bool is_last = &planned == &plan.buckets.back();
    buckets.push_back(make_bucket(planned, is_last ? tail_numel : 0, scatters));
    Bucket* before = bucket_before(planned);
    if (before != nullptr && buckets.back()->take_memory(*before)) continue;
    for (size_t slot = 0; slot < planned.slots.size(); ++slot) {
      const auto index = static_cast<size_t>(planned.slots[slot].parameter);
      const int32_t earlier = places_[index].bucket;
      if (earlier < 0) continue;
      const Bucket& holder = *buckets_[static_cast<size_t>(earlier)];
      if (holder.holds_gradient_of(parameters_[index])) buckets.back()->adopt_range(slot, holder);
    }
  }
  return buckets;
}

void BucketLayout::build(const Transport& transport) {
  if (!is_stale_) return;
  is_stale_ = false;
  takes_runs_ = transport.takes_runs;
  auto [plan, numbers] = plan_from(0, order_);
  const bool scatters = may_scatter() && !(transport.has_stream && StreamTransport::takes(plan));
  // Gradients may become a stream, which needs no runs, after the first backward.
  if (pool_) pool_->keep_idle(scatters && !arrivals_.is_observing() ? BufferPool::kIdle : 0);
  const bool tail_fits =
      transport.carries_tail && !scatters && !plan.buckets.empty() && !plan.buckets.back().sparse &&
      (plan.buckets.back().dtype == at::kFloat || plan.buckets.back().dtype == at::kDouble);
  std::vector<BucketPlace> places = places_in(plan);
  const bool deliver_as_described =
      std::all_of(buckets_.begin(), buckets_.end(),
                  [this](const auto& bucket) { return bucket->delivers_as(infos_); });
  const bool is_same =
      plan == plan_ && deliver_as_described && tail_fits == carries_tail_ && scatters == scatters_;
  if (!is_same || buckets_.empty()) {
    buckets_ = make_buckets(plan, tail_fits ? used_.numel() : 0, scatters);
    plan_ = std::move(plan);
    carries_tail_ = tail_fits;
    scatters_ = scatters;
    labels_.clear();
    for (size_t b = 0; b < buckets_.size(); ++b)
      labels_.push_back(options_.bucket_prefix + bucket_label(plan_, b, infos_));
  }
  numbers_ = std::move(numbers);
  places_ = std::move(places);  // a step may have left out some
}

void BucketLayout::leave_out(size_t parameter) {
  const BucketPlace place = std::exchange(places_[parameter], {});
  if (place.is_planned())
    buckets_[static_cast<size_t>(place.bucket)]->leave_empty(static_cast<size_t>(place.slot));
  is_stale_ = true;
}

void BucketLayout::exclude(const std::vector<bool>& parameters) {
  is_stale_ = is_stale_ || parameters != excluded_;
  excluded_ = parameters;
}

void BucketLayout::set_order(std::vector<int64_t> order) {
  order_ = std::move(order);
  is_stale_ = true;
}

void BucketLayout::keep_buckets() {
  if (kept_) return;
  kept_.emplace();
  is_stale_ = true;
}

void BucketLayout::update_trailing(int64_t step, int64_t world) {
  if (kept_) return;
  for (const int64_t index : order_) {
    const auto i = static_cast<size_t>(index);
    if (used_.ranks_using(index) < world) partly_used_at_[i] = step;
    const bool trails = step - partly_used_at_[i] < kTrailingSteps;
    if (trails != trailing_[i]) {
      trailing_[i] = trails;
      is_stale_ = true;
    }
  }
}

}  // namespace trireme
