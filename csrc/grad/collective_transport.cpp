#include <trireme/grad/collective_transport.h>

#include <utility>

namespace trireme {

void CollectiveTransport::begin(const TransportStep& step) {
  buckets_ = &step.buckets;
  scale_ = step.scale;
  map_ = step.map;
  shadow_ = step.shadow;
}

void CollectiveTransport::accumulated(size_t bucket, size_t slot) {
  (*buckets_)[bucket]->gradient_arrived(slot, scale_);
}

Pending CollectiveTransport::launch(const TransportBucket& request) {
  Bucket& bucket = request.bucket;
  bucket.complete(request.scale);
  if (bucket.has_tail()) map_->write_to(bucket.tail(), shadow_);
  return bucket.reduce(*sharers_, request.label);
}

Pending CollectiveTransport::reduce_outer(Bucket& bucket, const std::vector<bool>& slots,
                                          const std::string& label) {
  if (!outer_ || slots.empty()) return {};
  return outer_->sum(bucket.sums_of(slots), label);
}

void CollectiveTransport::announce_failure(const std::string& text) noexcept {
  announce(*ranks_, text);
  if (sharers_ != ranks_) announce(*sharers_, text);
  if (outer_) outer_->announce_failure(text);
}

}  // namespace trireme
