#include <trireme/grad/grad_reducer.h>
#include <trireme/memory/buffer_pool.h>
#include <trireme/memory/warm_heap.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

// How the plan comes to be. See [Note: the order of buckets] in grad_reducer.h.

namespace trireme {
namespace {

// A parameter that some rank left unused stays in a trailing bucket for that many synchronized
// steps, so that one that is used every other step does not move the buckets every step.
constexpr int64_t kTrailingSteps = 8;
// The gradients that a stream of deposits holds at a time at most, more often than not.
constexpr int64_t kGradientsInFlight = 4;

int64_t largest_gradient_bytes(const std::vector<ParameterInfo>& infos) {
  int64_t largest = 0;
  for (const ParameterInfo& info : infos)
    largest = std::max(largest, info.numel * static_cast<int64_t>(c10::elementSize(info.dtype)));
  return largest;
}

}  // namespace

std::vector<ParameterInfo> describe_parameters(const NamedParameters& parameters) {
  std::vector<ParameterInfo> infos;
  for (size_t i = 0; i < parameters.tensors.size(); ++i) {
    const at::Tensor& tensor = parameters.tensors[i];
    infos.push_back({parameters.names[i], tensor.sizes().vec(), tensor.numel(),
                     tensor.scalar_type(), tensor.device(), parameters.sparse_gradient[i],
                     tensor.requires_grad()});
  }
  return infos;
}

std::shared_ptr<GradReducer> GradReducer::make(NamedParameters parameters,
                                               std::shared_ptr<Communicator> communicator,
                                               GradReducerOptions options) {
  return std::shared_ptr<GradReducer>(
      new GradReducer(std::move(parameters), std::move(communicator), std::move(options)));
}

GradReducer::GradReducer(NamedParameters parameters, std::shared_ptr<Communicator> communicator,
                         GradReducerOptions options)
    : communicator_(std::move(communicator)),
      options_(std::move(options)),
      compressor_(may_scatter()
                      ? make_scatter_compressor(options_.scatters_with ? options_.scatters_with
                                                                       : communicator_)
                      : make_identity_compressor(communicator_)),
      divisor_(static_cast<double>(communicator_->world())) {
  if (may_scatter()) pool_ = std::make_shared<BufferPool>(parameters.tensors.front().device());
  set_parameters(parameters);
}

// Begins as if nothing had been known of any parameter before.
void GradReducer::set_parameters(const NamedParameters& parameters) {
  const size_t count = parameters.tensors.size();
  newcomers_.clear();
  hooks_.clear();
  buckets_.clear();
  places_.clear();
  plan_ = {};
  parameters_ = parameters.tensors;
  infos_ = describe_parameters(parameters);
  for (size_t i = 0; i < options_.reduce_dtypes.size(); ++i)
    infos_[i].reduce_dtype = options_.reduce_dtypes[i];
  hooks_.resize(count);
  storages_.clear();
  if (options_.compares_moved_values && communicator_->world() > 1) {
    for (const at::Tensor& parameter : parameters_) storages_.push_back(storage_of(parameter));
  }
  trailing_.assign(count, false);
  partly_used_at_.assign(count, step_ - kTrailingSteps);
  delivered_as_.assign(count, {});
  accumulated_as_.assign(count, {});
  set_aside_.assign(count, {});
  held_.assign(count, false);
  partial_sums_.assign(count, {});
  was_changed_.assign(count, false);
  fires_expected_.assign(count, 1);
  fires_seen_.assign(count, 0);
  is_delivered_.assign(count, false);
  used_ = UsedMap(static_cast<int64_t>(count));
  map_wire_.reset();
  arrivals_.clear();
  last_arrived_ = -1;
  observing_ = true;
  order_.clear();
  for (size_t i = count; i-- > 0;) {
    const auto index = static_cast<int64_t>(i);
    if (!infos_[i].requires_grad) continue;
    hooks_[i] = GradHook(parameters_[i], index, *this, options_.shards != nullptr);
    // Last registered, first to get its gradient: the guess until one was seen.
    order_.push_back(index);
  }
  build_buckets();
}

GradReducer::~GradReducer() = default;

BucketPlan GradReducer::make_plan(std::vector<int64_t> order) const {
  std::erase_if(order, [this](int64_t index) { return held_[static_cast<size_t>(index)]; });
  return make_bucket_plan(
      {infos_, std::move(order), trailing_, options_.caps, options_.reduce_dtype});
}

std::vector<GradReducer::Place> GradReducer::places_in(const BucketPlan& plan) const {
  std::vector<Place> places(parameters_.size());
  for (size_t b = 0; b < plan.buckets.size(); ++b) {
    const std::vector<BucketSlot>& slots = plan.buckets[b].slots;
    for (size_t slot = 0; slot < slots.size(); ++slot)
      places[static_cast<size_t>(slots[slot].parameter)] = {static_cast<int32_t>(b),
                                                            static_cast<int32_t>(slot)};
  }
  return places;
}

void GradReducer::build_buckets() {
  plan_is_stale_ = false;
  BucketPlan plan = make_plan(order_);
  const bool scatters = may_scatter() && !(stream_ && BucketStream::takes(plan));
  // Gradients may become a stream, which needs none of it, after the first backward.
  if (pool_) pool_->keep_idle(scatters && !observing_ ? BufferPool::kIdle : 0);
  const bool tail_fits =
      compressor_->is_plain_sum() && !scatters && !options_.defers_sums && !plan.buckets.empty() &&
      !plan.buckets.back().sparse &&
      (plan.buckets.back().dtype == at::kFloat || plan.buckets.back().dtype == at::kDouble);
  std::vector<Place> places = places_in(plan);
  if (plan == plan_ && tail_fits == tail_in_last_bucket_ && scatters == scatters_ &&
      !buckets_.empty()) {
    places_ = std::move(places);  // a step may have left out some
    return;
  }

  std::vector<Bucket> buckets;
  for (size_t b = 0; b < plan.buckets.size(); ++b) {
    const bool is_last = b + 1 == plan.buckets.size();
    buckets.emplace_back(plan.buckets[b], parameters_, is_last && tail_fits ? used_.numel() : 0,
                         own_shards(scatters));
    const std::vector<BucketSlot>& slots = plan.buckets[b].slots;
    for (size_t slot = 0; slot < slots.size(); ++slot) {
      const auto index = static_cast<size_t>(slots[slot].parameter);
      const int32_t earlier = places_.empty() ? -1 : places_[index].bucket;
      if (earlier >= 0 &&
          buckets_[static_cast<size_t>(earlier)].holds_gradient_of(parameters_[index])) {
        buckets.back().adopt_range(slot, buckets_[static_cast<size_t>(earlier)]);
      }
    }
  }
  plan_ = std::move(plan);
  places_ = std::move(places);
  buckets_ = std::move(buckets);
  tail_in_last_bucket_ = tail_fits;
  scatters_ = scatters;
  waiting_slots_.assign(buckets_.size(), 0);
  labels_.clear();
  for (size_t b = 0; b < buckets_.size(); ++b)
    labels_.push_back(options_.bucket_prefix + bucket_label(plan_, b, infos_));
}

// Sends rank 0's order to everybody at the end of the first synchronized backward.
void GradReducer::learn_order() {
  observing_ = false;
  // Here, and not when the reducer is made: one rank alone may copy or unpickle a module.
  const bool may_stream =
      compressor_->is_plain_sum() && !options_.replicates_with && BucketStream::takes(plan_);
  if (may_stream && !std::exchange(asked_for_stream_, true)) {
    BucketStream::Options options{.sharded = options_.shards != nullptr};
    if (options_.defers_sums)
      options.bytes = std::max(options.bytes, BucketStream::bytes_for(infos_));
    stream_ = BucketStream::make(*communicator_, options);
    if (stream_) keep_heap_warm(kGradientsInFlight * largest_gradient_bytes(infos_));
  }
  std::vector<bool> is_placed(parameters_.size(), true);
  for (const int64_t index : order_) is_placed[static_cast<size_t>(index)] = false;
  std::vector<int64_t> order;
  // A parameter is ready with its last gradient; read backwards, that is the first mention.
  for (auto index = arrivals_.rbegin(); index != arrivals_.rend(); ++index) {
    if (is_placed[static_cast<size_t>(*index)]) continue;
    is_placed[static_cast<size_t>(*index)] = true;
    order.push_back(*index);
  }
  std::reverse(order.begin(), order.end());
  for (const int64_t index : order_) {
    if (!is_placed[static_cast<size_t>(index)]) order.push_back(index);
  }
  pending_order_ = at::tensor(order, at::kLong).to(infos_.front().device);
  order_pending_ = communicator_->broadcast({pending_order_}, 0, "order of gradients");
}

void GradReducer::adopt_pending_order() {
  if (!pending_order_.defined()) return;
  try {
    order_pending_.wait();
  } catch (const c10::DistBackendError&) {
    if (communicator_->failure()) throw;
    pending_order_.reset();  // given up with a backward of another module: watch once more
    observing_ = true;
    return;
  }
  const at::Tensor host = pending_order_.to(at::kCPU);
  order_.assign(host.const_data_ptr<int64_t>(), host.const_data_ptr<int64_t>() + host.numel());
  pending_order_.reset();
  order_pending_ = {};
  plan_is_stale_ = true;
  hook_froze_order_ = !compressor_->is_plain_sum();
}

// The map is the same on all ranks, so all come to the same plan without a word.
void GradReducer::update_trailing() {
  if (hook_froze_order_) return;
  const int64_t world = communicator_->world();
  for (const int64_t index : order_) {
    const auto at = static_cast<size_t>(index);
    if (used_.ranks_using(index) < world) partly_used_at_[at] = step_;
    const bool trails = step_ - partly_used_at_[at] < kTrailingSteps;
    if (trails != trailing_[at]) {
      trailing_[at] = trails;
      plan_is_stale_ = true;
    }
  }
}

std::string GradReducer::describe_plan() const { return to_string(plan_, infos_); }

}  // namespace trireme
