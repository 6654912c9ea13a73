#include <trireme/grad/collective_wire.h>

#include <utility>

namespace trireme {

void CollectiveWire::begin(const WireStep& step) {
  buckets_ = &step.buckets;
  scale_ = step.scale;
  map_ = step.map;
  shadow_ = step.shadow;
}

void CollectiveWire::accumulated(size_t bucket, size_t slot) {
  (*buckets_)[bucket]->gradient_arrived(slot, scale_);
}

Pending CollectiveWire::launch(const WireBucket& request) {
  Bucket& bucket = request.bucket;
  bucket.complete(request.scale);
  if (bucket.has_tail()) map_->write_to(bucket.tail(), shadow_);
  return bucket.reduce(*sharers_, request.label);
}

Pending CollectiveWire::across(std::vector<at::Tensor> sums, const std::string& label) {
  return across_ ? across_->sum(std::move(sums), label) : Pending();
}

void CollectiveWire::announce_failure(const std::string& text) noexcept {
  announce(*ranks_, text);
  if (sharers_ != ranks_) announce(*sharers_, text);
  if (across_) across_->announce_failure(text);
}

}  // namespace trireme
