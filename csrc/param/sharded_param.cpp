#include <trireme/param/sharded_param.h>

#include <trireme/memory/flat_buffer.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

// See [Note: a parameter of a host, sharded and unsharded] in sharded_param.h.

namespace trireme {

ParameterInfo stored_info(const ShardedParamSpec& spec, at::ScalarType dtype) {
  std::vector<int64_t> sizes = spec.sizes;
  std::rotate(sizes.begin(), sizes.begin() + spec.dim, sizes.begin() + spec.dim + !sizes.empty());
  const int64_t numel = c10::multiply_integers(sizes);
  return {spec.name, std::move(sizes), numel, dtype, c10::kCPU, false, spec.requires_grad};
}

ShardedParam::ShardedParam(ShardedParamSpec spec, int64_t index, RankOf where,
                           const ParamStores& stores)
    : spec_(std::move(spec)) {
  if (spec_.is_replicated()) {
    const at::Tensor own_copy = at::zeros({1}, at::TensorOptions().dtype(spec_.dtype));
    sharded_ = range_of(own_copy, {}, {}, 0);
    unsharded_ = spec_.is_cast() ? at::zeros({}, at::TensorOptions().dtype(*spec_.param_dtype))
                                 : range_of(own_copy, {}, {}, 0);
    own_cast_ = unsharded_;
    place_ = sharded_.detach();
    return;
  }
  const int64_t rows = spec_.sizes[static_cast<size_t>(spec_.dim)];
  const int64_t chunk = (rows + where.world - 1) / where.world;
  first_row_ = std::min(where.rank * chunk, rows);
  rows_ = std::min(chunk, rows - first_row_);
  const auto shard_of = [&](HostStore& store) {
    const ParameterInfo& info = store.parameters()[static_cast<size_t>(index)];
    const int64_t row_numel = rows == 0 ? 0 : info.numel / rows;
    std::vector<int64_t> sizes = info.sizes;
    sizes.front() = rows_;
    return along_dim(store.shard(index, {first_row_ * row_numel, rows_ * row_numel}, sizes));
  };
  sharded_ = shard_of(*stores.original);
  place_ = sharded_.detach();
  HostStore& read_from = spec_.is_cast() ? *stores.cast : *stores.original;
  unsharded_ = along_dim(read_from.whole(index));
  if (spec_.is_cast()) own_cast_ = shard_of(*stores.cast);
}

// The dimension that lies first in memory goes where the user has it.
at::Tensor ShardedParam::along_dim(const at::Tensor& stored) const {
  if (spec_.dim == 0) return stored;
  const at::Tensor view = stored.movedim(0, spec_.dim);
  return range_of(view, view.sizes(), view.strides(), 0);
}

void ShardedParam::write_whole(const at::Tensor& whole) const {
  write_shard(spec_.is_replicated() ? whole : whole.narrow(spec_.dim, first_row_, rows_));
}

void ShardedParam::write_shard(const at::Tensor& shard) const {
  const at::NoGradGuard no_grad;
  sharded_.copy_(shard);
}

void ShardedParam::cast_own() const {
  if (!spec_.is_cast()) return;
  const at::NoGradGuard no_grad;
  own_cast_.copy_(sharded_);
}

}  // namespace trireme
