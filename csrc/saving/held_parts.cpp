#include <trireme/saving/held_parts.h>

#include <trireme/memory/shard_plan.h>

#include <ATen/ATen.h>

namespace trireme {
namespace {

// Returns, as this rank's part of a tensor that all ranks have, the rows that torch.chunk gives it.
CheckpointTensor own_rows(const std::string& name, const at::Tensor& values, RankOf where) {
  CheckpointTensor made{name, values.scalar_type(), values.sizes().vec(), {}};
  if (values.dim() == 0) {
    if (where.rank == 0) made.part.values = values.detach();
    return made;
  }
  const ChunkRows own = chunk_rows(values.size(0), where);
  made.part.values = values.detach().narrow(0, own.first, own.count);
  made.part.first.resize(made.sizes.size());
  made.part.first.front() = own.first;
  return made;
}

}  // namespace

CheckpointTensor part_to_save(const std::string& name, const at::Tensor& values,
                              const HeldPart* held, RankOf where) {
  if (held == nullptr) return own_rows(name, values, where);
  return part_to_load(name, values.scalar_type(), values, held);
}

CheckpointTensor part_to_load(const std::string& name, at::ScalarType dtype,
                              const at::Tensor& values, const HeldPart* held) {
  if (held == nullptr) return {name, dtype, values.sizes().vec(), {values.detach()}};
  CheckpointTensor made{name, dtype, held->sizes, {}};
  // An empty part may have other dimensions than the whole.
  if (values.numel() > 0) made.part = {values.detach(), held->first};
  return made;
}

}  // namespace trireme
