#include <trireme/param/sharded_param.h>

#include <trireme/memory/flat_buffer.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

// See [Note: a parameter, sharded and unsharded] in sharded_param.h.

namespace trireme {

ParameterInfo stored_info(const ShardedParamSpec& spec, at::ScalarType dtype) {
  std::vector<int64_t> sizes = spec.sizes;
  std::rotate(sizes.begin(), sizes.begin() + spec.dim, sizes.begin() + spec.dim + !sizes.empty());
  const int64_t numel = c10::multiply_integers(sizes);
  ParameterInfo info{spec.name, std::move(sizes),  numel, dtype, c10::kCPU,
                     false,     spec.requires_grad};
  if (spec.gradient_dtype() != dtype) info.grad_dtype = spec.gradient_dtype();
  return info;
}

ShardRows::ShardRows(const ShardedParamSpec& spec, RankOf where) {
  if (spec.is_replicated()) return;
  const int64_t rows = spec.sizes[static_cast<size_t>(spec.dim)];
  static_cast<ChunkRows&>(*this) = chunk_rows(rows, where);
  numel = rows == 0 ? 0 : c10::multiply_integers(spec.sizes) / rows;
}

ShardedParam::ShardedParam(ShardedParamSpec spec, RankOf where, const ParamPlace& place)
    : spec_(std::move(spec)),
      rows_(spec_, where),
      sharded_(along_dim(place.shard)),
      place_(sharded_.detach()),
      unsharded_(along_dim(place.whole)),
      gradient_leaf_(sharded_) {
  if (place.own_cast.defined()) own_cast_ = along_dim(place.own_cast);
  if (spec_.offload != ShardOffload::kNone) {
    const at::Tensor no_memory = at::empty({0}, sharded_.options().device(unsharded_.device()));
    gradient_leaf_ = range_of(no_memory, sharded_.sizes(), sharded_.strides(), 0);
  }
  if (!spec_.grad_dtype) return;
  sharded_.set_grad_dtype(spec_.grad_dtype);
  gradient_leaf_.set_grad_dtype(spec_.grad_dtype);
}

// Moves the dimension that lies first in memory to the user's place. By hand: `stored` may have no
// memory now.
at::Tensor ShardedParam::along_dim(const at::Tensor& stored) const {
  if (spec_.dim == 0) return stored;
  const auto moved = [this](at::IntArrayRef of_stored) {
    std::vector<int64_t> of_user = of_stored.vec();
    std::rotate(of_user.begin(), of_user.begin() + 1, of_user.begin() + 1 + spec_.dim);
    return of_user;
  };
  return range_of(stored, moved(stored.sizes()), moved(stored.strides()), stored.storage_offset());
}

void ShardedParam::write_whole(const at::Tensor& whole) const {
  write_shard(spec_.is_replicated() ? whole : whole.narrow(spec_.dim, rows_.first, rows_.count));
}

void ShardedParam::write_shard(const at::Tensor& shard) const {
  const at::NoGradGuard no_grad;
  sharded_.copy_(shard);
}

void ShardedParam::cast_own() const {
  if (!own_cast_.defined()) return;
  const at::NoGradGuard no_grad;
  own_cast_.copy_(sharded_.to(own_cast_.device(), /*non_blocking=*/true));
}

}  // namespace trireme
