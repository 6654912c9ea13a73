#include <trireme/param/host_params.h>

#include <trireme/comm/host.h>
#include <trireme/common/error.h>
#include <trireme/memory/flat_buffer.h>
#include <trireme/memory/host_store.h>
#include <trireme/param/gathered_params.h>
#include <trireme/shm/host_group.h>
#include <trireme/shm/segment.h>

#include <ATen/ATen.h>

#include <utility>

namespace trireme {
namespace {

std::shared_ptr<HostStore> make_store(const std::vector<ParameterInfo>& infos,
                                      Communicator& communicator) {
  const RankOf where = communicator.rank_of();
  const int64_t bytes = HostStore::bytes_for(infos, where.world);
  if (where.world == 1) {  // no rank to share it with
    auto segment = shm::Segment::create(shm::SegmentKind::kAnonymous, bytes);
    return HostStore::make(std::make_shared<const shm::Segment>(std::move(segment)), infos, where);
  }
  HostMemory host;
  if (Host* ranks = communicator.host())
    host = ranks->share_host_memory(bytes, "parameters of " + infos.front().name);
  TORCH_CHECK(
      host.memory.segment,
      error_text("fully_shard", "got ranks that cannot share parameters: " + host.memory.why_not,
                 where, "Give them memory, or use a backend that gathers parameters (\"gloo\")."));
  return HostStore::make(std::move(host.memory.segment), infos, host.where);
}

void take_no_room(ParameterInfo& info) {
  info.sizes = {0};
  info.numel = 0;
}

at::Tensor private_shard(const ShardedParamSpec& spec, RankOf where) {
  std::vector<int64_t> sizes = stored_info(spec, spec.dtype).sizes;
  if (!spec.is_replicated()) sizes.front() = ShardRows(spec, where).count;
  return at::zeros(sizes, at::TensorOptions().dtype(spec.dtype));
}

// Returns another tensor over the same memory.
at::Tensor over(const at::Tensor& memory) {
  return range_of(memory, memory.sizes(), memory.strides(), 0);
}

}  // namespace

HostParams::HostParams(const std::vector<ShardedParamSpec>& specs,
                       std::shared_ptr<Communicator> communicator)
    : specs_(specs), communicator_(std::move(communicator)) {
  std::vector<ParameterInfo> original;
  std::vector<ParameterInfo> cast;
  bool casts = false;
  for (const ShardedParamSpec& spec : specs_) {
    original.push_back(stored_info(spec, spec.dtype));
    cast.push_back(stored_info(spec, spec.param_dtype.value_or(spec.dtype)));
    private_shards_.push_back(is_private(spec) ? private_shard(spec, communicator_->rank_of())
                                               : at::Tensor());
    if (is_private(spec)) take_no_room(original.back());
    if (!spec.is_cast()) take_no_room(cast.back());
    casts = casts || spec.is_cast();
  }
  original_ = make_store(original, *communicator_);
  if (casts) cast_ = make_store(cast, *communicator_);
}

at::Tensor HostParams::shard_of(HostStore& store, int64_t parameter, RankOf where) const {
  const ShardRows rows(spec_of(parameter), where);
  std::vector<int64_t> sizes = store.parameters()[static_cast<size_t>(parameter)].sizes;
  sizes.front() = rows.count;
  return store.shard(parameter, {rows.first * rows.numel, rows.count * rows.numel}, sizes);
}

ParamPlace HostParams::place(int64_t parameter) const {
  const ShardedParamSpec& spec = spec_of(parameter);
  ParamPlace place;
  const at::Tensor& private_memory = private_shards_[static_cast<size_t>(parameter)];
  if (spec.is_replicated()) {
    place.shard = over(private_memory);
    place.whole = spec.is_cast() ? at::zeros({}, at::TensorOptions().dtype(*spec.param_dtype))
                                 : over(private_memory);
    if (spec.is_cast()) place.own_cast = place.whole;
    return place;
  }
  const RankOf own = communicator_->rank_of();
  place.shard = is_private(spec) ? over(private_memory) : shard_of(*original_, parameter, own);
  place.whole = (spec.is_cast() ? cast_ : original_)->whole(parameter);
  if (spec.is_cast()) place.own_cast = shard_of(*cast_, parameter, own);
  return place;
}

bool HostParams::has_other_hosts() const {
  Host* host = communicator_->host();
  return host != nullptr && host->group().world() < communicator_->world();
}

PartsByRank HostParams::parts() const {
  if (!has_other_hosts()) return {};
  const int64_t world = communicator_->world();
  PartsByRank parts(static_cast<size_t>(world));
  for (int64_t i = 0; i < static_cast<int64_t>(specs_.size()); ++i) {
    if (spec_of(i).is_replicated()) continue;
    HostStore& read_from = spec_of(i).is_cast() ? *cast_ : *original_;
    for (int64_t rank = 0; rank < world; ++rank)
      parts[static_cast<size_t>(rank)].push_back(shard_of(read_from, i, {rank, world}));
  }
  return parts;
}

at::Tensor HostParams::read_whole(int64_t parameter) {
  const ShardedParamSpec& spec = spec_of(parameter);
  if (!is_private(spec)) return original_->whole(parameter);
  return gather_whole(spec, private_shards_[static_cast<size_t>(parameter)], *communicator_);
}

}  // namespace trireme
