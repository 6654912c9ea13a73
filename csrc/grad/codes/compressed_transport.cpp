#include <trireme/grad/codes/compressed_transport.h>

#include <utility>

namespace trireme {

void CompressedTransport::begin(const TransportStep& step) {
  buckets_ = &step.buckets;
  infos_ = step.parameters;
  tensors_ = step.tensors;
  arrived_.assign(infos_->size(), false);
  coder_.begin_step();
  for (const auto& bucket : step.buckets)
    if (bucket->plan().sparse) refuse(bucket->plan().slots.front().parameter);
}

void CompressedTransport::accumulated(size_t bucket, size_t slot) {
  Bucket& to = *(*buckets_)[bucket];
  const int64_t parameter = to.plan().slots[slot].parameter;
  const auto index = static_cast<size_t>(parameter);
  if ((*tensors_)[index].grad().layout() != at::kStrided) refuse(parameter);
  arrived_[index] = true;
  to.gradient_arrived(slot, /*scale=*/1);
}

Pending CompressedTransport::launch(const TransportBucket& request) {
  Bucket& bucket = request.bucket;
  bucket.complete(/*scale=*/1);
  CodedBucket coded{bucket.payload(), {}, request.scale, request.label};
  const bool is_planned = is_of_step(request);
  for (const BucketSlot& slot : bucket.plan().slots) {
    const auto index = static_cast<size_t>(slot.parameter);
    const ParameterInfo& info = (*infos_)[index];
    // A bucket beside the plan holds what other ranks may have left out.
    coded.parameters.push_back({(*tensors_)[index], info.name, info.sizes, slot.numel,
                                slot.parameter, slot.offset, is_planned && arrived_[index]});
  }
  return coder_.code(coded);
}

bool CompressedTransport::is_of_step(const TransportBucket& request) const {
  return request.index < buckets_->size() && (*buckets_)[request.index].get() == &request.bucket;
}

void CompressedTransport::announce_failure(const std::string& text) noexcept {
  announce(*ranks_, text);
  coder_.announce_failure(text);
}

std::unique_ptr<CompressedTransport> make_compressed_transport(
    const std::shared_ptr<Communicator>& ranks, const Compression& compression) {
  check(compression);
  if (!has_several_senders(*ranks, between(compression))) return nullptr;
  return std::make_unique<CompressedTransport>(ranks, compression);
}

void CompressedTransport::refuse(int64_t parameter) const {
  refuse_sparse((*infos_)[static_cast<size_t>(parameter)].name, ranks_->rank_of());
}

}  // namespace trireme
