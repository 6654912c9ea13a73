#include <trireme/grad/launch_queue.h>

#include <trireme/common/trace.h>

#include <chrono>
#include <memory>
#include <utility>

namespace trireme {

using Clock = StepClock::Clock;

namespace {

constexpr size_t kMostInFlight = 2;
constexpr std::chrono::seconds kPatience{1};

// Takes the result of a communication hook, if that is not the bucket itself.
void take_result(Bucket& bucket, Pending& pending) {
  const std::vector<at::Tensor> result = pending.result();
  if (!result.empty()) bucket.take_result(result.front());
}

}  // namespace

void LaunchQueue::begin(const Step& step, const std::vector<bool>& unused) {
  step_ = step;
  next_launch_ = next_reduced_ = next_deliver_ = 0;
  waits_in_vain_ = false;
  flights_.clear();
  flights_.resize(layout_.buckets().size());
  for (size_t i = 0; i < layout_.parameters().size(); ++i) {
    const BucketPlace place = layout_.place_of(i);
    if (!place.is_planned() || !layout_.infos()[i].requires_grad) continue;
    if (unused.empty() || !unused[i]) ++flights_[static_cast<size_t>(place.bucket)].waiting;
  }
  is_delivered_.assign(layout_.parameters().size(), false);
}

void LaunchQueue::launch_ready() {
  const size_t first = next_launch_;
  while (can_launch()) launch(next_launch_);
  if (next_launch_ == first || step_.delivers_late || !layout_.device().is_cpu()) return;
  while (next_reduced_ < next_launch_ && flights_[next_reduced_].pending.done())
    finish_reduction(next_reduced_);
  deliver_reduced();
}

void LaunchQueue::launch_rest() {
  while (next_launch_ < flights_.size()) launch(next_launch_);
  step_.transport->close();
}

void LaunchQueue::launch(size_t index) {
  TRIREME_TRACE("launch_queue.launch");
  Bucket& bucket = bucket_at(index);
  Pending* before = index > 0 ? &flights_[index - 1].pending : nullptr;
  const bool is_last = index + 1 == flights_.size();
  flights_[index].pending =
      step_.transport->launch({bucket, index, layout_.number_of(index), is_last,
                               layout_.labels()[index], step_.scale, before});
  clock_.bucket_launched(bucket.plan().bytes());
  ++next_launch_;
  if (layout_.scatters() && !step_.delivers_late) keep_few_in_flight();
}

// Each bucket that is reduce_scattered has a buffer as long as it is on its way. But a rank that
// has left a parameter out launches its bucket when its backward is over, and until then may need
// others for something else, such as a gather: a rank that waits for it in vain goes on.
void LaunchQueue::keep_few_in_flight() {
  const auto begin = Clock::now();
  while (next_launch_ - next_reduced_ > kMostInFlight && !waits_in_vain_) {
    const bool is_on_cpu = bucket_at(next_reduced_).plan().device.is_cpu();
    waits_in_vain_ = is_on_cpu && !flights_[next_reduced_].pending.comes_within(kPatience);
    if (!waits_in_vain_) finish_reduction(next_reduced_);
  }
  deliver_reduced();
  clock_.waited(Clock::now() - begin);
}

// Waits for a bucket: then the ranks that share it have its sum, their replicas perhaps not yet.
void LaunchQueue::finish_reduction(size_t index) {
  Flight& flight = flights_[index];
  flight.pending.wait();
  clock_.bucket_done(index, flight.pending.finished_at());
  Bucket& bucket = bucket_at(index);
  take_result(bucket, flight.pending);
  if (!step_.transport->traits().streams) bucket.keep_own();
  flight.outer =
      step_.transport->reduce_outer(bucket, delivery_.take_sums(bucket), layout_.labels()[index]);
  ++next_reduced_;
}

// Delivers reduced buckets to their .grad, but waits for no replica: one that is not so far yet may
// wait in a gather for another rank, and that one, in the same way, for a replica of its own, and
// so on round to this rank.
void LaunchQueue::deliver_reduced() {
  while (next_deliver_ < next_reduced_ && flights_[next_deliver_].outer.done())
    deliver_arrived(next_deliver_);
}

void LaunchQueue::deliver_arrived(size_t index) {
  if (index == next_reduced_) finish_reduction(index);
  flights_[index].outer.wait();
  ++next_deliver_;
  deliver_used(bucket_at(index), GradDelivery::DeliveryTime::kAtOnce);
}

// Delivers the gradients that this rank used, of the parameters whose turn it is. Only the map can
// say whether another rank used the others.
void LaunchQueue::deliver_used(Bucket& bucket, GradDelivery::DeliveryTime turn) {
  std::vector<int64_t> delivered;
  for (size_t slot = 0; slot < bucket.plan().slots.size(); ++slot) {
    const int64_t parameter = bucket.plan().slots[slot].parameter;
    const auto index = static_cast<size_t>(parameter);
    if (!layout_.place_of(index).is_planned()) continue;
    const GradDelivery::DeliveryTime own = delivery_.delivery_time_of(index);
    if (own == GradDelivery::DeliveryTime::kHeldBack)
      is_delivered_[index] = true;  // it is where it belongs
    if (own != turn || !layout_.used().used_here(parameter)) continue;
    is_delivered_[index] = true;
    delivery_.deliver(bucket, slot);
    if (delivered_) delivered.push_back(parameter);
  }
  if (!delivered.empty()) delivered_(delivered);
}

void LaunchQueue::deliver_rest() {
  const auto begin = Clock::now();
  while (next_deliver_ < flights_.size()) deliver_arrived(next_deliver_);
  clock_.waited(Clock::now() - begin);
}

void LaunchQueue::deliver_shown() {
  if (!delivery_.show_sums(layout_.buckets())) return;
  for (const auto& bucket : layout_.buckets())
    deliver_used(*bucket, GradDelivery::DeliveryTime::kAfterShown);
}

bool LaunchQueue::has_delivered_all() const {
  for (size_t i = 0; i < is_delivered_.size(); ++i)
    if (!is_delivered_[i] && layout_.place_of(i).is_planned()) return false;
  return true;
}

void LaunchQueue::deliver_by_map() {
  if (has_delivered_all()) return;
  const UsedMap& used = layout_.used();
  for (const auto& bucket : layout_.buckets()) {
    const std::vector<BucketSlot>& slots = bucket->plan().slots;
    for (size_t slot = 0; slot < slots.size(); ++slot) {
      const int64_t parameter = slots[slot].parameter;
      const auto index = static_cast<size_t>(parameter);
      if (!layout_.place_of(index).is_planned() || is_delivered_[index]) continue;
      if (used.ranks_using(parameter) == 0) {
        step_.transport->unused(parameter);
        delivery_.restore(*bucket, slot);
        continue;
      }
      delivery_.deliver(*bucket, slot);
      if (delivered_) delivered_({parameter});
    }
  }
}

void LaunchQueue::reduce_extra_bucket(Transport& transport, double scale,
                                      const std::vector<int64_t>& parameters,
                                      const std::vector<bool>& used) {
  const auto [plan, numbers] = layout_.plan_beside(parameters);
  std::vector<bool> is_asked_for(layout_.parameters().size(), false);
  for (const int64_t parameter : parameters) is_asked_for[static_cast<size_t>(parameter)] = true;
  for (size_t b = 0; b < plan.buckets.size(); ++b) {
    const std::vector<BucketSlot>& slots = plan.buckets[b].slots;
    Buckets beside;
    beside.push_back(layout_.make_bucket(plan.buckets[b]));
    Bucket& bucket = *beside.front();
    bucket.begin_step(step_.shadow);
    const std::string label = "left-out " + bucket_label(plan, b, layout_.infos());
    Pending pending = transport.launch({bucket, b, numbers[b], /*is_last=*/false, label, scale});
    pending.wait();
    take_result(bucket, pending);
    bucket.keep_own();
    transport.reduce_outer(bucket, delivery_.take_sums(bucket), label).wait();
    delivery_.show_sums(beside);
    for (size_t slot = 0; slot < slots.size(); ++slot) {
      const auto index = static_cast<size_t>(slots[slot].parameter);
      if (is_asked_for[index] && !used[index]) transport.unused(slots[slot].parameter);
      if (!is_asked_for[index] || !used[index]) continue;
      if (delivery_.delivery_time_of(index) == GradDelivery::DeliveryTime::kHeldBack) continue;
      delivery_.deliver(bucket, slot);
      if (delivered_) delivered_({slots[slot].parameter});
    }
  }
}

}  // namespace trireme
