#include <trireme/strategies/fsdp/module_checkpoint.h>

#include <trireme/comm/launch.h>
#include <trireme/comm/only_device.h>
#include <trireme/saving/checkpoint.h>
#include <trireme/strategies/fsdp/sharded_module.h>
#include <trireme/strategies/fsdp/sharded_root.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace trireme {
namespace {

constexpr const char* kExtra = "extra.json";

struct Shard {
  const ShardedParam* param;
  RankOf sharing;  // this rank, among those that share it
};
using ShardsByTensor = std::unordered_map<const at::TensorImpl*, Shard>;

ShardsByTensor shards_in(const torch::nn::Module& module) {
  std::vector<const ShardedModule*> units;
  for (const ShardedModule* unit : units_below(module)) units.push_back(unit);
  if (const auto* unit = dynamic_cast<const ShardedModule*>(&module)) units.push_back(unit);
  ShardsByTensor shards;
  for (const ShardedModule* unit : units)
    for (const ShardedParam* param : unit->sharded_params())
      shards.insert({param->sharded().unsafeGetTensorImpl(), {param, unit->sharing()}});
  return shards;
}

// By torch.chunk's rule: where this rank's rows begin, and how many it has.
std::pair<int64_t, int64_t> rows_of(int64_t rows, RankOf where) {
  const int64_t chunk = (rows + where.world - 1) / where.world;
  const int64_t first = std::min(where.rank * chunk, rows);
  return {first, std::min(chunk, rows - first)};
}

CheckpointTensor whole_tensor(const std::string& name, const at::Tensor& tensor) {
  return {name, tensor.scalar_type(), tensor.sizes().vec(), {tensor.detach()}};
}

// Of what all ranks have, each writes its rows.
CheckpointTensor own_rows(const std::string& name, const at::Tensor& tensor, RankOf where) {
  CheckpointTensor made = whole_tensor(name, tensor);
  if (tensor.dim() > 0) {
    const auto [first, rows] = rows_of(tensor.size(0), where);
    made.part.values = made.part.values.narrow(0, first, rows);
    made.part.first.resize(made.sizes.size());
    made.part.first.front() = first;
  } else if (where.rank != 0) {
    made.part = {};
  }
  return made;
}

CheckpointTensor own_shard(const std::string& name, const Shard& shard) {
  const ShardedParamSpec& spec = shard.param->spec();
  const auto dim = static_cast<size_t>(spec.dim);
  std::vector<int64_t> first(spec.sizes.size());
  first[dim] = rows_of(spec.sizes[dim], shard.sharing).first;
  return {name, spec.dtype, spec.sizes, {shard.param->sharded().detach(), std::move(first)}};
}

// What this rank writes, or with `loads` what it reads.
std::vector<CheckpointTensor> tensors_of(const torch::nn::Module& module, RankOf where,
                                         bool loads) {
  const ShardsByTensor shards = shards_in(module);
  std::unordered_set<const at::TensorImpl*> seen;  // a shared tensor is there once
  std::vector<CheckpointTensor> tensors;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& tensor = item.value();
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    const auto shard = shards.find(tensor.unsafeGetTensorImpl());
    if (shard != shards.end() && !shard->second.param->spec().is_replicated()) {
      tensors.push_back(own_shard(item.key(), shard->second));
    } else {
      tensors.push_back(loads ? whole_tensor(item.key(), tensor)
                              : own_rows(item.key(), tensor, where));
    }
  }
  for (const auto& item : module.named_buffers()) {
    if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
    tensors.push_back(whole_tensor(item.key(), item.value()));
    if (!loads && where.rank != 0) tensors.back().part = {};
  }
  return tensors;
}

void begin_writing(torch::nn::Module& module) {
  if (auto* unit = dynamic_cast<ShardedModule*>(&module)) return unit->begin_writing();
  for (const auto& child : module.children()) begin_writing(*child);
}

CheckpointRanks ranks_of(std::shared_ptr<Communicator> communicator) {
  if (!communicator) communicator = current_communicator();
  const c10::Device device = device_of_texts(*communicator);
  return {std::move(communicator), device};
}

}  // namespace

std::vector<const ShardedParam*> ShardedModule::sharded_params() const {
  std::vector<const ShardedParam*> params;
  if (group_)
    for (const ShardedParam& param : group_->params()) params.push_back(&param);
  return params;
}

void save_checkpoint(const std::string& path, const torch::nn::Module& module,
                     const ModuleCheckpointOptions& options) {
  const CheckpointRanks ranks = ranks_of(options.communicator);
  CheckpointContent content;
  content.tensors[kModelTensors] = tensors_of(module, ranks.where(), /*loads=*/false);
  if (!options.extra.empty()) content.texts[kExtra] = options.extra;
  save_checkpoint({path, content, options.max_file_bytes}, ranks);
}

std::string load_checkpoint(const std::string& path, torch::nn::Module& module,
                            std::shared_ptr<Communicator> communicator) {
  const CheckpointRanks ranks = ranks_of(std::move(communicator));
  const CheckpointReader reader(path, ranks);
  const std::vector<CheckpointTensor> tensors = tensors_of(module, ranks.where(), /*loads=*/true);
  reader.check(kModelTensors, tensors);
  begin_writing(module);
  reader.read(kModelTensors, tensors);
  return reader.text(kExtra);
}

}  // namespace trireme
