#include <trireme/grad/codes/replica_codes.h>

#include <algorithm>
#include <utility>

namespace trireme {

void ReplicaCodesTransport::begin(const TransportStep& step) {
  buckets_ = &step.buckets;
  infos_ = step.parameters;
  tensors_ = step.tensors;
  scale_ = step.scale;
  arrived_.assign(infos_->size(), false);
  coder_.begin_step();
  inner_.begin(step);
}

void ReplicaCodesTransport::accumulated(size_t bucket, size_t slot) {
  const auto parameter = static_cast<size_t>((*buckets_)[bucket]->plan().slots[slot].parameter);
  if ((*tensors_)[parameter].grad().layout() != at::kStrided)
    refuse_sparse((*infos_)[parameter].name, ranks_->rank_of());
  arrived_[parameter] = true;
  inner_.accumulated(bucket, slot);
}

bool ReplicaCodesTransport::is_planned(const Bucket& bucket) const {
  return std::any_of(buckets_->begin(), buckets_->end(),
                     [&](const auto& planned) { return planned.get() == &bucket; });
}

Pending ReplicaCodesTransport::reduce_outer(Bucket& bucket, const std::vector<bool>& slots,
                                            const std::string& label) {
  // What is coded is the mean of the sharers' gradients, whatever they are divided by later.
  const double divisor = scale_ * static_cast<double>(sharers_);
  const at::Tensor sums = bucket.own_sums();
  CodedBucket coded{sums, {}, divisor, label, 1 / divisor};
  const bool planned = is_planned(bucket);
  for (size_t slot = 0; slot < slots.size(); ++slot) {
    const int64_t parameter = bucket.plan().slots[slot].parameter;
    const auto index = static_cast<size_t>(parameter);
    const CodedShard& shard = shards_[index];
    if (!slots[slot] || shard.numel == 0) continue;
    coded.parameters.push_back({(*tensors_)[index], (*infos_)[index].name, shard.sizes, shard.numel,
                                parameter,
                                bucket.own_sum(slot).storage_offset() - sums.storage_offset(),
                                planned && arrived_[index], shard.largest});
  }
  return coded.parameters.empty() ? Pending() : coder_.code(coded);
}

}  // namespace trireme
