#include <trireme/param/gathered_params.h>

#include <trireme/common/error.h>
#include <trireme/memory/buffer_pool.h>
#include <trireme/memory/flat_buffer.h>
#include <trireme/memory/storage_access.h>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/grad_mode.h>

#include <utility>

// See [Note: pieces] in gathered_params.h.

namespace trireme {
namespace {

constexpr int64_t kAlignBytes = 64;

int64_t aligned(int64_t bytes) { return (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes; }

at::Tensor contiguous_range(const at::Tensor& buffer, at::IntArrayRef sizes, int64_t offset) {
  return range_of(buffer, sizes, at::detail::defaultStrides(sizes), offset);
}

// A gather on a stream beside that of the waiting caller.
class GatherBeside final : public Pending::State {
 public:
  GatherBeside(Pending gather, StreamHandoff& handoff)
      : gather_(std::move(gather)), handoff_(handoff) {}
  bool done() const override { return gather_.done(); }
  void wait() override {
    gather_.wait();
    handoff_.join();
  }
  std::optional<Pending::Clock::time_point> finished_at() const override {
    return gather_.finished_at();
  }

 private:
  Pending gather_;
  StreamHandoff& handoff_;  // belongs to the same parameters
};

}  // namespace

GatheredParams::GatheredParams(Request request)
    : communicator_(std::move(request.communicator)),
      reshards_with_(std::move(request.reshards_with)),
      device_(request.device),
      pins_memory_(request.pins_memory),
      pool_(std::make_shared<BufferPool>(device_)),
      copies_(device_) {
  const RankOf where = communicator_->rank_of();
  const int64_t among = reshards_with_ ? reshards_with_->world() : 0;
  TORCH_CHECK_VALUE(
      among == 0 || (among > 1 && among < where.world && where.world % among == 0),
      error_text("fully_shard", "got " + std::to_string(among) + " ranks to reshard among", where,
                 "Pass a factor of " + std::to_string(where.world) + ", above 1 and below it."));
  std::vector<int64_t> offsets;
  for (const ShardedParamSpec& spec : request.specs) {
    entries_.push_back(make_entry(spec));
    is_offloaded_ = is_offloaded_ || spec.offload != ShardOffload::kNone;
    offsets.push_back(bytes_);
    const ShardRows rows(spec, where);
    const auto item = static_cast<int64_t>(c10::elementSize(spec.param_dtype.value_or(spec.dtype)));
    const int64_t most = item * (spec.is_replicated() ? 1 : rows.most * rows.numel);
    bytes_ += aligned(spec.is_replicated() ? most : where.world * most);
    if (among > 0 && !spec.is_replicated()) pieces_bytes_ += aligned(where.world / among * most);
  }
  const at::Tensor buffer =
      at::empty({bytes_}, at::TensorOptions().dtype(at::kByte).device(device_));
  storage_ = buffer.storage();
  for (size_t i = 0; i < entries_.size(); ++i) lay_out(entries_[i], buffer, offsets[i]);
  has_memory_ = true;
  release();
}

GatheredParams::Entry GatheredParams::make_entry(const ShardedParamSpec& spec) const {
  const auto on_device = at::TensorOptions().device(device_);
  Entry entry;
  entry.spec = spec;
  std::vector<int64_t> sizes = stored_info(spec, spec.dtype).sizes;
  if (!spec.is_replicated()) sizes.front() = ShardRows(spec, communicator_->rank_of()).count;
  // A storage of its own: saving or pickling a shard writes no more than that.
  entry.shard = spec.offload == ShardOffload::kNone ? at::empty(sizes, on_device.dtype(spec.dtype))
                                                    : on_host(sizes, spec);
  if (spec.is_replicated()) entry.shard.zero_();
  if (spec.offload == ShardOffload::kOptimizer)
    entry.copied = at::empty(sizes, on_device.dtype(spec.param_dtype.value_or(spec.dtype)));
  return entry;
}

at::Tensor GatheredParams::on_host(at::IntArrayRef sizes, const ShardedParamSpec& spec) const {
  try {
    return at::empty(sizes, at::TensorOptions().dtype(spec.dtype).pinned_memory(pins_memory_));
  } catch (const c10::Error& error) {
    if (!pins_memory_) throw;
    C10_THROW_ERROR(Error, error_text("fully_shard",
                                      "got no pinned memory for the offloaded part of '" +
                                          spec.name + "': " + error.what_without_backtrace(),
                                      communicator_->rank_of(),
                                      "Pass pin_memory=False to the offload policy."));
  }
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
  if (!reshards_with_) return;
  const int64_t numel = where.world / reshards_with_->world() * most;
  entry.piece = contiguous_range(typed, {numel}, offset + reshards_with_->rank() * numel);
}

ParamPlace GatheredParams::place(int64_t parameter) const {
  const Entry& entry = entries_[static_cast<size_t>(parameter)];
  return {entry.shard, entry.whole, entry.copied};
}

Pending GatheredParams::gather(const std::string& label) {
  const at::NoGradGuard no_grad;
  const bool of_pieces = has_pieces_;
  if (!has_memory_) {
    take_buffer(label);
    if (of_pieces) copy_pieces(/*into_buffer=*/true);
  }
  has_pieces_ = reshards_with_ != nullptr;
  if (!is_offloaded_) return gather_now(of_pieces, label);
  Pending gathering;
  copies_.beside([&] { gathering = gather_now(of_pieces, label); });
  return Pending(std::make_unique<GatherBeside>(std::move(gathering), copies_));
}

Pending GatheredParams::gather_now(bool of_pieces, const std::string& label) {
  copy_in_shards(/*only_replicated=*/of_pieces);
  std::vector<at::Tensor> regions;
  std::vector<at::Tensor> own;
  for (const Entry& entry : entries_) {
    if (entry.spec.is_replicated() || entry.region.numel() == 0) continue;
    regions.push_back(entry.region);
    own.push_back(of_pieces ? entry.piece : entry.own);
  }
  if (regions.empty() || communicator_->world() == 1) return {};
  if (!of_pieces) return communicator_->all_gather(std::move(regions), std::move(own), label);
  return reshards_with_->all_gather(std::move(regions), std::move(own), label + sharers_text());
}

void GatheredParams::take_buffer(const std::string& label) {
  c10::StorageImpl& storage = *storage_.unsafeGetStorageImpl();
  allow_access(storage);
  storage.set_data_ptr_noswap(pool_->take(bytes_, label.c_str()));
  storage.set_nbytes(static_cast<size_t>(bytes_));
  has_memory_ = true;
}

void GatheredParams::copy_in_shards(bool only_replicated) {
  for (const Entry& entry : entries_) {
    if (only_replicated && !entry.spec.is_replicated()) continue;
    // Copies in the shard's own dtype: a cast on the way would go through memory that is not
    // pinned.
    const at::Tensor& source = entry.copied.defined() ? entry.copied : entry.shard;
    entry.own_shard.copy_(source.to(device_, /*non_blocking=*/true));
  }
}

void GatheredParams::release() {
  if (!has_memory_) return;
  const at::NoGradGuard no_grad;
  if (has_pieces_ && !pieces_.defined()) {
    pieces_ = pool_->empty({pieces_bytes_}, at::kByte, "pieces of a unit");
    copy_pieces(/*into_buffer=*/false);
  }
  has_memory_ = false;
  c10::StorageImpl& storage = *storage_.unsafeGetStorageImpl();
  storage.set_data_ptr_noswap(at::DataPtr(nullptr, device_));
  storage.set_nbytes(0);
  if (bytes_ == 0) return;
  refuse_access(
      storage,
      error_text("fully_shard", "got an access to parameters while they are not gathered",
                 communicator_->rank_of(), "Read this rank's shards, or call unshard() first."));
}

void GatheredParams::copy_pieces(bool into_buffer) const {
  int64_t offset = 0;
  for (const Entry& entry : entries_) {
    if (!entry.piece.defined()) continue;
    const auto bytes = static_cast<int64_t>(entry.piece.nbytes());
    const at::Tensor kept = pieces_.narrow(0, offset, bytes).view(entry.piece.scalar_type());
    into_buffer ? entry.piece.copy_(kept) : kept.copy_(entry.piece);
    offset += aligned(bytes);
  }
}

void GatheredParams::forget_pieces() {
  has_pieces_ = false;
  pieces_.reset();
}

void GatheredParams::reshard_to_all() {
  forget_pieces();
  reshards_with_.reset();
}

std::string GatheredParams::sharers_text() const {
  const int64_t first = communicator_->rank() - reshards_with_->rank();
  const int64_t last = first + reshards_with_->world() - 1;
  return " (from ranks " + std::to_string(first) + " to " + std::to_string(last) + ")";
}

at::Tensor GatheredParams::to_shard(int64_t parameter, const at::Tensor& gradient) {
  const Entry& entry = entries_[static_cast<size_t>(parameter)];
  if (entry.spec.offload == ShardOffload::kNone) return gradient;
  const at::NoGradGuard no_grad;
  at::Tensor on_host =
      at::empty_like(gradient, at::TensorOptions().device(c10::kCPU).pinned_memory(pins_memory_));
  StreamHandoff::keep(gradient);
  return on_host.copy_(gradient, /*non_blocking=*/pins_memory_);
}

void GatheredParams::copy_shards(const std::function<void()>& copy) {
  is_offloaded_ ? copies_.beside(copy) : copy();
}

at::Tensor GatheredParams::read_whole(int64_t parameter) {
  const Entry& entry = entries_[static_cast<size_t>(parameter)];
  return gather_whole(entry.spec, entry.shard.to(device_), *communicator_);
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
