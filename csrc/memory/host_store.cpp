#include <trireme/memory/host_store.h>

#include <trireme/common/forks.h>
#include <trireme/memory/storage_access.h>
#include <trireme/shm/segment.h>

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <utility>

namespace trireme {
namespace {

constexpr std::string_view kStoreArea = "host_store";

bool counts_versions(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference();
}

int64_t version_seen(const at::Tensor& tensor) {
  return counts_versions(tensor) ? tensor._version() : 0;
}

}  // namespace

int64_t HostStore::bytes_for(const std::vector<ParameterInfo>& parameters, int64_t world) {
  return world * static_cast<int64_t>(sizeof(RankLine)) + make_store_layout(parameters).bytes;
}

std::shared_ptr<HostStore> HostStore::make(std::shared_ptr<const shm::Segment> segment,
                                           std::vector<ParameterInfo> parameters, RankOf where) {
  const int64_t needed = bytes_for(parameters, where.world);
  const int64_t bytes = segment ? segment->bytes() : 0;
  TORCH_CHECK_VALUE(bytes >= needed,
                    error_text(kStoreArea,
                               "got a mapping of " + std::to_string(bytes) + " bytes, " +
                                   std::to_string(parameters.size()) + " parameters need " +
                                   std::to_string(needed),
                               where, "Share HostStore::bytes_for(parameters, world) bytes."));
  for (const ParameterInfo& info : parameters) {
    TORCH_CHECK_VALUE(info.device.is_cpu(),
                      error_text(kStoreArea,
                                 "got parameter " + info.name + " on " + info.device.str() +
                                     ", expected CPU memory",
                                 where, "Keep parameters of other devices out of the store."));
  }
  return std::shared_ptr<HostStore>(
      new HostStore(std::move(segment), std::move(parameters), where));
}

HostStore::HostStore(std::shared_ptr<const shm::Segment> segment,
                     std::vector<ParameterInfo> parameters, RankOf where)
    : segment_(std::move(segment)),
      private_in_children_(segment_->private_in_children()),
      parameters_(std::move(parameters)),
      layout_(make_store_layout(parameters_)),
      where_(where) {}

HostStore::RankLine& HostStore::line_of(int64_t rank) const {
  return reinterpret_cast<RankLine*>(segment_->data())[rank];
}

const ParameterInfo& HostStore::info_of(int64_t parameter) const {
  return parameters_.at(static_cast<size_t>(parameter));
}

std::byte* HostStore::data_of(int64_t parameter) const {
  return reinterpret_cast<std::byte*>(&line_of(where_.world)) +
         layout_.offsets.at(static_cast<size_t>(parameter));
}

at::Tensor HostStore::whole(int64_t parameter) const {
  const ParameterInfo& info = info_of(parameter);
  return shard(parameter, {0, info.numel}, info.sizes);
}

at::Tensor HostStore::shard(int64_t parameter, const ShardRange& range,
                            at::IntArrayRef sizes) const {
  const ParameterInfo& info = info_of(parameter);
  TORCH_CHECK_VALUE(
      range.begin >= 0 && range.numel >= 0 && range.numel <= info.numel - range.begin &&
          c10::multiply_integers(sizes) == range.numel,
      error_text(kStoreArea,
                 "got elements [" + std::to_string(range.begin) + ", " +
                     std::to_string(range.begin + range.numel) + ") as a shard of " +
                     std::to_string(c10::multiply_integers(sizes)) + " elements, but " + info.name +
                     " has " + std::to_string(info.numel),
                 where_, "Pass a range of the plan that the store was made for."));
  const auto item_bytes = static_cast<int64_t>(c10::elementSize(info.dtype));
  return at::from_blob(
      data_of(parameter) + range.begin * item_bytes, sizes,
      [keeps_alive = shared_from_this()](void*) {}, at::TensorOptions().dtype(info.dtype));
}

bool HostStore::holds(int64_t parameter, const at::Tensor& tensor) const {
  const ParameterInfo& info = info_of(parameter);
  if (!tensor.defined() || !tensor.has_storage() || !tensor.is_cpu() ||
      tensor.scalar_type() != info.dtype || tensor.sizes() != at::IntArrayRef(info.sizes))
    return false;
  if (info.numel == 0) return true;
  // fully_shard's parameters, for one, must not be read while they are not gathered.
  return allows_access(*tensor.storage().unsafeGetStorageImpl()) && tensor.is_contiguous() &&
         tensor.const_data_ptr() == data_of(parameter);
}

uint64_t HostStore::version() const {
  uint64_t least = version_of(0).load(std::memory_order_acquire);
  for (int64_t rank = 1; rank < where_.world; ++rank)
    least = std::min(least, version_of(rank).load(std::memory_order_acquire));
  return least;
}

void HostStore::publish_version(uint64_t version) {
  std::atomic<uint64_t>& own = line_of(where_.rank).version;
  TORCH_INTERNAL_ASSERT(version >= own.load(std::memory_order_relaxed));
  own.store(version, std::memory_order_seq_cst);
}

const std::atomic<uint64_t>& HostStore::version_of(int64_t rank) const {
  return line_of(rank).version;
}

void HostStore::publish_release(uint64_t version, const FactorRange& factor) {
  RankLine& own = line_of(where_.rank);
  own.least_factor.store(factor.least, std::memory_order_relaxed);
  own.most_factor.store(factor.most, std::memory_order_relaxed);
  own.release.store(version, std::memory_order_seq_cst);
}

FactorRange HostStore::factor_of(int64_t rank) const {
  const RankLine& line = line_of(rank);
  return {line.least_factor.load(std::memory_order_relaxed),
          line.most_factor.load(std::memory_order_relaxed)};
}

const std::atomic<uint64_t>& HostStore::release_of(int64_t rank) const {
  return line_of(rank).release;
}

void HostStore::snapshot_versions(const std::vector<at::Tensor>& tensors) {
  TORCH_INTERNAL_ASSERT(tensors.size() == parameters_.size());
  versions_seen_.clear();
  for (const at::Tensor& tensor : tensors) versions_seen_.push_back(version_seen(tensor));
}

std::vector<int64_t> HostStore::changed_outside(const std::vector<at::Tensor>& tensors) const {
  TORCH_INTERNAL_ASSERT(tensors.size() == parameters_.size());
  std::vector<int64_t> changed;
  for (size_t i = 0; i < versions_seen_.size(); ++i)
    if (version_seen(tensors[i]) != versions_seen_[i]) changed.push_back(static_cast<int64_t>(i));
  return changed;
}

void HostStore::bump_versions(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors)
    if (counts_versions(tensor)) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace trireme
