#include <trireme/grad/hook_transport.h>

#include <trireme/comm/c10d/comm_hook.h>

#include <utility>
#include <vector>

namespace trireme {

HookTransport::HookTransport(std::shared_ptr<Communicator> ranks, std::shared_ptr<CommHook> hook,
                             const std::vector<at::Tensor>& parameters)
    : Transport(
          std::move(ranks),
          {.divides = true, .keeps_buckets = true, .carries_map = false, .map_goes_last = true}),
      hook_(std::move(hook)),
      parameters_(parameters) {}

void HookTransport::accumulated(size_t bucket, size_t slot) {
  (*buckets_)[bucket]->gradient_arrived(slot, /*scale=*/1);
}

Pending HookTransport::launch(const TransportBucket& request) {
  Bucket& bucket = request.bucket;
  if (request.before != nullptr && bucket.plan().device.is_cpu()) request.before->wait();
  bucket.complete(/*scale=*/1);
  HookBucket shown;
  const auto index = static_cast<size_t>(request.number);
  shown.index = index;
  shown.bucket_count = index + (request.is_last ? 1 : 2);
  shown.buffer = bucket.payload();
  const std::vector<BucketSlot>& slots = bucket.plan().slots;
  for (size_t i = 0; i < slots.size(); ++i) {
    shown.offsets.push_back(static_cast<size_t>(slots[i].offset));
    shown.lengths.push_back(static_cast<size_t>(slots[i].numel));
    shown.sizes.emplace_back(bucket.slot_sizes(i));
    shown.parameters.push_back(parameters_[static_cast<size_t>(slots[i].parameter)]);
  }
  return hook_->run(std::move(shown), request.label);
}

}  // namespace trireme
