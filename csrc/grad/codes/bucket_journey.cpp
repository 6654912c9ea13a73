#include <trireme/grad/codes/bucket_journey.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace trireme {

class BucketJourneys::Arrival final : public Pending::State {
 public:
  Arrival(std::shared_ptr<BucketJourneys> journeys, size_t index)
      : journeys_(std::move(journeys)), index_(index) {}
  bool done() const override { return journeys_->is_done(index_); }
  void wait() override { journeys_->wait_for(index_); }

 private:
  std::shared_ptr<BucketJourneys> journeys_;
  size_t index_;
};

Pending BucketJourneys::start(BucketJourney journey) {
  Stages stages{std::move(journey)};
  if (senders_.inside && !stages.journey.gradients.empty())
    stages.inside =
        senders_.inside->all_reduce(stages.journey.gradients, ReduceOp::kSum, stages.journey.label);
  all_.push_back(std::move(stages));
  send_codes(/*waits=*/!senders_.inside);
  return Pending(std::make_unique<Arrival>(shared_from_this(), all_.size() - 1));
}

// Sends the codes of all buckets whose sums are there, or come while this `waits`.
void BucketJourneys::send_codes(bool waits) {
  for (; sent_ < all_.size(); ++sent_) {
    Stages& next = all_[sent_];
    if (!waits && !next.inside.done()) return;
    next.inside.wait();
    if (senders_.has_leg()) next.between = next.journey.exchange();
  }
}

// Decodes, and gives the means to the other ranks of the host.
void BucketJourneys::spread_means(size_t index) {
  Stages& stages = all_[index];
  stages.between.pending.wait();
  for (size_t leg = 0; senders_.spread && leg < stages.journey.parts_of_legs.size(); ++leg) {
    std::vector<at::Tensor>& parts = stages.journey.parts_of_legs[leg];
    if (parts.empty()) continue;
    stages.spread.push_back(
        senders_.spread->broadcast(parts, static_cast<int64_t>(leg), stages.journey.label));
  }
  spread_ = index + 1;
}

// Brings a bucket, and what has come so far behind it, on its way. One whose means are there waits
// for no later one, for which a peer may first need this rank elsewhere.
void BucketJourneys::go_on_to(size_t index) {
  send_codes(/*waits=*/true);
  for (; gone_on_ < sent_; ++gone_on_)
    if (const auto& go_on = all_[gone_on_].between.go_on) go_on();
  for (size_t i = spread_; i <= index; ++i) spread_means(i);
}

bool BucketJourneys::is_done(size_t index) {
  send_codes(/*waits=*/false);
  if (index == spread_ && index < sent_ && all_[index].between.pending.done()) spread_means(index);
  return index < spread_ && std::all_of(
                                all_[index].spread.begin(), all_[index].spread.end(),
                                [](const Pending& verb) { return verb.done(); });
}

void BucketJourneys::wait_for(size_t index) {
  if (index >= spread_) go_on_to(index);
  Stages& stages = all_[index];
  for (Pending& verb : stages.spread) verb.wait();
  if (stages.journey.copy_to.defined()) stages.journey.copy_to.copy_(stages.journey.memory);
  stages.journey = {};
}

}  // namespace trireme
