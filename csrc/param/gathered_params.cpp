#include <trireme/param/gathered_params.h>

#include <trireme/memory/buffer_pool.h>
#include <trireme/memory/flat_buffer.h>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>

#include <utility>

namespace trireme {
namespace {

constexpr int64_t kAlignBytes = 64;

at::Tensor contiguous_range(const at::Tensor& buffer, at::IntArrayRef sizes, int64_t offset) {
  return range_of(buffer, sizes, at::detail::defaultStrides(sizes), offset);
}

}  // namespace

GatheredParams::GatheredParams(const std::vector<ShardedParamSpec>& specs,
                               std::shared_ptr<Communicator> communicator, c10::Device device)
    : communicator_(std::move(communicator)),
      device_(device),
      pool_(std::make_shared<BufferPool>(device)) {
  const RankOf where = communicator_->rank_of();
  std::vector<int64_t> offsets;
  for (const ShardedParamSpec& spec : specs) {
    const auto options = at::TensorOptions().dtype(spec.dtype).device(device_);
    const ShardRows rows(spec, where);
    Entry entry;
    entry.spec = spec;
    std::vector<int64_t> sizes = stored_info(spec, spec.dtype).sizes;
    if (!spec.is_replicated()) sizes.front() = rows.count;
    // A storage of its own: who saves or pickles a shard gets no more than that.
    entry.shard = spec.is_replicated() ? at::zeros({}, options) : at::empty(sizes, options);
    entries_.push_back(std::move(entry));
    offsets.push_back(bytes_);
    const auto item = static_cast<int64_t>(c10::elementSize(spec.param_dtype.value_or(spec.dtype)));
    const int64_t bytes = item * (spec.is_replicated() ? 1 : where.world * rows.most * rows.numel);
    bytes_ += (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
  }
  const at::Tensor buffer =
      at::empty({bytes_}, at::TensorOptions().dtype(at::kByte).device(device_));
  storage_ = buffer.storage();
  for (size_t i = 0; i < entries_.size(); ++i) lay_out(entries_[i], buffer, offsets[i]);
  has_memory_ = true;
  release();
}

void GatheredParams::lay_out(Entry& entry, const at::Tensor& buffer, int64_t offset_bytes) const {
  const ShardedParamSpec& spec = entry.spec;
  const at::ScalarType dtype = spec.param_dtype.value_or(spec.dtype);
  const int64_t offset = offset_bytes / static_cast<int64_t>(c10::elementSize(dtype));
  const at::Tensor typed = buffer.view(dtype);
  const std::vector<int64_t> sizes = stored_info(spec, dtype).sizes;
  entry.whole = contiguous_range(typed, sizes, offset);
  if (spec.is_replicated()) {
    entry.own_shard = contiguous_range(typed, sizes, offset);
    return;
  }
  const RankOf where = communicator_->rank_of();
  const ShardRows rows(spec, where);
  const int64_t most = rows.most * rows.numel;
  entry.region = contiguous_range(typed, {where.world * most}, offset);
  entry.own = contiguous_range(typed, {most}, offset + where.rank * most);
  std::vector<int64_t> own_sizes = sizes;
  own_sizes.front() = rows.count;
  entry.own_shard = contiguous_range(typed, own_sizes, offset + where.rank * most);
}

ParamPlace GatheredParams::place(int64_t parameter) const {
  const Entry& entry = entries_[static_cast<size_t>(parameter)];
  return {entry.shard, entry.whole, {}};
}

Pending GatheredParams::gather(const std::string& label) {
  const at::NoGradGuard no_grad;
  if (!has_memory_) {
    c10::StorageImpl& storage = *storage_.unsafeGetStorageImpl();
    storage.set_data_ptr_noswap(pool_->take(bytes_, label.c_str()));
    storage.set_nbytes(static_cast<size_t>(bytes_));
    has_memory_ = true;
  }
  std::vector<at::Tensor> regions;
  std::vector<at::Tensor> own;
  for (const Entry& entry : entries_) {
    entry.own_shard.copy_(entry.shard);
    if (entry.spec.is_replicated() || entry.region.numel() == 0) continue;
    regions.push_back(entry.region);
    own.push_back(entry.own);
  }
  if (regions.empty() || communicator_->world() == 1) return {};
  return communicator_->all_gather(std::move(regions), std::move(own), label);
}

void GatheredParams::release() {
  if (!std::exchange(has_memory_, false)) return;
  c10::StorageImpl& storage = *storage_.unsafeGetStorageImpl();
  storage.set_data_ptr_noswap(at::DataPtr(nullptr, device_));
  storage.set_nbytes(0);
}

at::Tensor GatheredParams::read_whole(int64_t parameter) {
  const Entry& entry = entries_[static_cast<size_t>(parameter)];
  return gather_whole(entry.spec, entry.shard, *communicator_);
}

at::Tensor gather_whole(const ShardedParamSpec& spec, const at::Tensor& shard,
                        Communicator& communicator) {
  const RankOf where = communicator.rank_of();
  const at::NoGradGuard no_grad;
  if (spec.is_replicated() || where.world == 1) return shard.clone();
  const ShardRows rows(spec, where);
  const int64_t most = rows.most * rows.numel;
  const at::Tensor all = at::empty({where.world * most}, shard.options());
  const at::Tensor own = all.narrow(0, where.rank * most, most);
  own.narrow(0, 0, shard.numel()).copy_(shard.view({-1}));
  communicator.all_gather({all}, {own}, "parameter " + spec.name).wait();
  return contiguous_range(all, stored_info(spec, spec.dtype).sizes, 0);
}

}  // namespace trireme
