#include <trireme/comm/c10d/custom_communicator.h>
#include <trireme/grad/grad_reducer.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

// What happens to a sum, of which each rank has its shards, before it becomes .grad: it is summed
// up over replicas, now or in a later backward, and shown to who asked for it.

namespace trireme {

void GradReducer::defer_all_reduce(const std::vector<bool>& deferred) {
  const std::lock_guard lock(mutex_);
  TORCH_INTERNAL_ASSERT(deferred.size() == parameters_.size());
  deferred_ = options_.replicates_with ? deferred : std::vector<bool>();
}

void GradReducer::set_summed_callback(std::vector<bool> chosen, SummedCallback callback) {
  const std::lock_guard lock(mutex_);
  TORCH_INTERNAL_ASSERT(has_owners() && chosen.size() == parameters_.size());
  chosen_ = std::move(chosen);
  summed_callback_ = std::move(callback);
}

// Settles a bucket: the ranks that share it have its sum, those that replicate them perhaps not
// yet.
void GradReducer::settle(size_t index) {
  pending_[index].wait();
  clock_.bucket_done(index, pending_[index].finished_at());
  Bucket& bucket = buckets_[index];
  const std::vector<at::Tensor> result = pending_[index].result();
  if (!result.empty()) bucket.take_result(result.front());
  if (options_.shards && !streams_) bucket.keep_own();
  replicas_pending_[index] = sum_over_replicas(bucket, labels_[index]);
  ++next_settle_;
}

// Says whether a scatter may wait inside a launch. A rank that waited there, in the middle of
// backward, for one that leaves out units could not come to the gathers in which that one waits for
// it.
bool GradReducer::scatter_waits() const {
  const auto* custom = dynamic_cast<const CustomCommunicator*>(options_.scatters_with.get());
  return custom != nullptr && custom->scatter_waits();
}

// Delivers settled buckets to their .grad, but waits for no replica: one that has not come so far
// yet may wait in a gather for another rank, and that one, in the same way, for a replica of its
// own, and so on round to this rank.
void GradReducer::deliver_settled() {
  while (next_deliver_ < next_settle_ &&
         (!options_.replicates_with || replicas_pending_[next_deliver_].done()))
    deliver_arrived(next_deliver_);
}

// A bucket is waited for after those before it, on all ranks: so they come here in one order.
Pending GradReducer::sum_over_replicas(Bucket& bucket, const std::string& label) {
  if (!options_.replicates_with) return {};
  const std::vector<BucketSlot>& slots = bucket.plan().slots;
  std::vector<bool> goes_on;
  for (size_t slot = 0; slot < slots.size(); ++slot) {
    const auto index = static_cast<size_t>(slots[slot].parameter);
    at::Tensor own = bucket.own_sum(slot);
    at::Tensor& partial = partial_sums_[index];
    if (partial.defined()) own.add_(partial);
    partial = is_deferred(index) ? std::move(own) : at::Tensor();
    if (is_deferred(index)) parameters_[index].mutable_grad().reset();  // it is in there
    goes_on.push_back(!is_deferred(index));
  }
  std::vector<at::Tensor> sums = bucket.sums_of(goes_on);
  if (sums.empty()) return {};
  return options_.replicates_with->all_reduce(std::move(sums), ReduceOp::kSum, label);
}

// Returns the factor that a sum, of gradients that were divided by divisor_, still lacks.
double GradReducer::last_scale(size_t index) const {
  const double factor = divide_factors_.empty() ? 0 : divide_factors_[index];
  return factor > 0 ? divisor_ / factor : 1;
}

void GradReducer::add_own_sums(Bucket& bucket, std::vector<OwnSum>& sums) const {
  const std::vector<BucketSlot>& slots = bucket.plan().slots;
  for (size_t slot = 0; slot < slots.size(); ++slot) {
    const int64_t parameter = slots[slot].parameter;
    const auto index = static_cast<size_t>(parameter);
    if (!is_chosen(index) || is_deferred(index)) continue;
    OwnSum own{parameter, bucket.own_sum(slot)};
    if (last_scale(index) != 1) own.values.mul_(last_scale(index));
    for (int64_t rank = 0; rank < options_.shards->world; ++rank)
      own.longest = std::max(own.longest, options_.shards->of(parameter, rank).numel);
    sums.push_back(std::move(own));
  }
}

void GradReducer::show_sums() {
  if (!summed_callback_) return;
  std::vector<OwnSum> sums;
  for (Bucket& bucket : buckets_) add_own_sums(bucket, sums);
  if (sums.empty()) return;
  const SummedCallback callback = summed_callback_;  // a copy: it may take itself back
  callback(sums);
  for (Bucket& bucket : buckets_) deliver_used(bucket, /*chosen=*/true);
}

// Begins the use of parameters anew: what is used from here on counts for the next synchronization,
// as does what no .grad has yet.
void GradReducer::begin_use_anew() {
  std::vector<int64_t> kept;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    const bool is_held = held_[i] && parameters_[i].grad().defined();
    if (is_held || (partial_sums_[i].defined() && used_.used_here(index))) kept.push_back(index);
  }
  used_.clear();
  for (const int64_t index : kept) used_.mark_used(index);
}

// Collects where no backward runs, whose end would tell the others of an exception: it tells them
// itself.
void GradReducer::collect_by_itself(bool may_learn) {
  try {
    launch_rest();
    collect(may_learn);
  } catch (...) {
    abandon_backward();
    throw;
  }
}

}  // namespace trireme
