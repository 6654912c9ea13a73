#include <trireme/saving/module_checkpoint.h>

#include <trireme/comm/launch/launch.h>
#include <trireme/saving/checkpoint_reader.h>
#include <trireme/saving/held_parts.h>
#include <trireme/saving/optimizer_state.h>

#include <ATen/ATen.h>

#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace trireme {
namespace {

const torch::nn::Module& plain_module(const torch::nn::Module& module) {
  const auto* wrapper = dynamic_cast<const WrapsModule*>(&module);
  return wrapper != nullptr ? plain_module(wrapper->wrapped()) : module;
}

// Finds the outermost modules in a module, itself included, that hold parts.
void find_holders(torch::nn::Module& module, std::vector<HoldsParts*>& found) {
  if (auto* holder = dynamic_cast<HoldsParts*>(&module)) return found.push_back(holder);
  for (const auto& child : module.children()) find_holders(*child, found);
}

HeldParts parts_in(const torch::nn::Module& module, const torch::optim::Optimizer* optimizer) {
  HeldParts parts;
  const auto add = [&](const auto* one) {
    if (const auto* holder = dynamic_cast<const HoldsParts*>(one)) holder->add_parts(parts);
  };
  add(&module);
  for (const auto& child : module.modules(/*include_self=*/false)) add(child.get());
  if (optimizer != nullptr) add(optimizer);
  return parts;
}

const HeldPart* part_of(const HeldParts& parts, const at::Tensor& tensor) {
  const auto found = parts.find(tensor.unsafeGetTensorImpl());
  return found == parts.end() ? nullptr : &found->second;
}

// Returns what this rank writes of a module, or with `loads` what it reads.
std::vector<CheckpointTensor> tensors_of(const torch::nn::Module& module, const HeldParts& parts,
                                         RankOf where, bool loads) {
  std::unordered_set<const at::TensorImpl*> seen;  // a shared tensor is there once
  std::vector<CheckpointTensor> tensors;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& tensor = item.value();
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    const HeldPart* held = part_of(parts, tensor);
    const at::Tensor& values = held != nullptr ? held->values : tensor;
    tensors.push_back(loads ? part_to_load(item.key(), tensor.scalar_type(), values, held)
                            : part_to_save(item.key(), values, held, where));
  }
  for (const auto& item : module.named_buffers()) {
    if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
    tensors.push_back(part_to_load(item.key(), item.value().scalar_type(), item.value(), nullptr));
    if (!loads && where.rank != 0) tensors.back().part = {};
  }
  return tensors;
}

std::unordered_map<const at::TensorImpl*, std::string> names_in(const torch::nn::Module& module) {
  std::unordered_map<const at::TensorImpl*, std::string> names;
  for (const auto& item : module.named_parameters())
    names.try_emplace(item.value().unsafeGetTensorImpl(), item.key());
  return names;
}

CheckpointRanks ranks_of(std::shared_ptr<Communicator> communicator) {
  if (!communicator) communicator = current_communicator();
  const c10::Device device = communicator->device();
  return {std::move(communicator), device};
}

// Calls `write` where parts may be written.
template <typename Write>
void write_parts(const std::vector<HoldsParts*>& holders, const Write& write) {
  for (HoldsParts* one : holders) one->begin_writing();
  try {
    write();
  } catch (const std::exception& error) {
    for (HoldsParts* one : holders) one->abandon_writing(error.what());
    throw;
  }
  for (HoldsParts* one : holders) one->end_writing();
}

}  // namespace

void save_checkpoint(const std::string& path, const torch::nn::Module& module,
                     const SaveCheckpointOptions& options) {
  const CheckpointRanks ranks = ranks_of(options.communicator);
  const RankOf where = ranks.where();
  const torch::nn::Module& plain = plain_module(module);
  CheckpointContent content;
  together(ranks, [&] {
    const HeldParts parts = parts_in(plain, options.optimizer);
    content.tensors[kModelTensors] = tensors_of(plain, parts, where, /*loads=*/false);
    if (options.optimizer == nullptr) return;
    OptimizerToSave saved =
        optimizer_to_save(name_optimizer(*options.optimizer, names_in(plain), parts, where));
    content.tensors[kOptimizerTensors] = std::move(saved.tensors);
    content.texts[kOptimizerText] = std::move(saved.text);
  });
  if (!options.extra.empty()) content.texts[kExtraText] = options.extra;
  save_checkpoint({path, content, options.max_file_bytes}, ranks);
}

std::string load_checkpoint(const std::string& path, torch::nn::Module& module,
                            const LoadCheckpointOptions& options) {
  const CheckpointRanks ranks = ranks_of(options.communicator);
  const RankOf where = ranks.where();
  const torch::nn::Module& plain = plain_module(module);
  const CheckpointReader reader(path, ranks);
  HeldParts parts;
  std::vector<CheckpointTensor> tensors;
  together(ranks, [&] {
    parts = parts_in(plain, options.optimizer);
    tensors = tensors_of(plain, parts, where, /*loads=*/true);
  });
  reader.check(kModelTensors, tensors);
  std::optional<NamedOptimizer> named;
  std::optional<OptimizerToLoad> loaded;
  if (options.optimizer != nullptr) {
    together(ranks, [&] {
      named = name_optimizer(*options.optimizer, names_in(plain), parts, where);
      loaded.emplace(*named, reader);
    });
    reader.read(kOptimizerTensors, loaded->counts());
    together(ranks, [&] { loaded->take_counts(); });
  }
  std::vector<HoldsParts*> holders;
  find_holders(module, holders);
  if (auto* sharded = dynamic_cast<HoldsParts*>(options.optimizer)) holders.push_back(sharded);
  write_parts(holders, [&] {
    // Reads parts only now: whoever may write has them where they belong.
    reader.read(kModelTensors, tensors_of(plain, parts, where, /*loads=*/true));
    if (loaded) reader.read(kOptimizerTensors, loaded->tensors());
  });
  if (loaded) loaded->put();
  return reader.text(kExtraText);
}

}  // namespace trireme
