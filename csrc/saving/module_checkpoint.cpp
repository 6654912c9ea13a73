#include <trireme/saving/module_checkpoint.h>

#include <trireme/comm/launch/launch.h>
#include <trireme/common/error.h>
#include <trireme/saving/checkpoint_reader.h>
#include <trireme/saving/held_parts.h>
#include <trireme/saving/optimizer_state.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
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

// Adds all parameters and buffers of this rank's stages, which other ranks may not have.
void add_stages(const torch::nn::Module& module, HeldParts& parts) {
  for (const auto& items : {module.named_parameters(), module.named_buffers()}) {
    for (const auto& item : items) {
      const at::Tensor& tensor = item.value();
      const auto dims = static_cast<size_t>(tensor.dim());
      parts.try_emplace(tensor.unsafeGetTensorImpl(),
                        HeldPart{tensor, tensor.sizes().vec(), std::vector<int64_t>(dims, 0)});
    }
  }
}

HeldParts parts_in(const torch::nn::Module& module, const torch::optim::Optimizer* optimizer) {
  HeldParts parts;
  const auto add = [&](const auto* object) {
    if (const auto* holder = dynamic_cast<const HoldsParts*>(object)) holder->add_parts(parts);
  };
  add(&module);
  for (const auto& child : module.modules(/*include_self=*/false)) add(child.get());
  if (optimizer != nullptr) add(optimizer);
  if (dynamic_cast<const HoldsStages*>(&module) != nullptr) add_stages(module, parts);
  return parts;
}

// Returns the name of a tensor in the whole module.
std::string name_in_whole(const torch::nn::Module& module, const std::string& name) {
  const auto* stages = dynamic_cast<const HoldsStages*>(&module);
  if (stages == nullptr) return name;
  const auto found = stages->names_in_whole().find(name);
  return found == stages->names_in_whole().end() ? name : found->second;
}

const HeldPart* part_of(const HeldParts& parts, const at::Tensor& tensor) {
  const auto found = parts.find(tensor.unsafeGetTensorImpl());
  return found == parts.end() ? nullptr : &found->second;
}

// Returns the tensors that this rank writes of a module, or reads if `loads`.
std::vector<CheckpointTensor> tensors_of(const torch::nn::Module& module, const HeldParts& parts,
                                         RankOf where, bool loads) {
  std::unordered_set<const at::TensorImpl*> seen;  // tied tensors are listed once
  std::vector<CheckpointTensor> tensors;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& tensor = item.value();
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    const HeldPart* held = part_of(parts, tensor);
    const at::Tensor& values = held != nullptr ? held->values : tensor;
    const std::string name = name_in_whole(module, item.key());
    tensors.push_back(loads ? part_to_load(name, tensor.scalar_type(), values, held)
                            : part_to_save(name, values, held, where));
  }
  for (const auto& item : module.named_buffers()) {
    const at::Tensor& tensor = item.value();
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    const HeldPart* held = part_of(parts, tensor);
    const std::string name = name_in_whole(module, item.key());
    tensors.push_back(part_to_load(name, tensor.scalar_type(), tensor, held));
    if (!loads && held == nullptr && where.rank != 0) tensors.back().part = {};
  }
  return tensors;
}

std::unordered_map<const at::TensorImpl*, std::string> names_in(const torch::nn::Module& module) {
  std::unordered_map<const at::TensorImpl*, std::string> names;
  for (const auto& item : module.named_parameters())
    names.try_emplace(item.value().unsafeGetTensorImpl(), name_in_whole(module, item.key()));
  return names;
}

// Returns the ranks that save or load `module`.
CheckpointRanks ranks_of(std::shared_ptr<Communicator> communicator,
                         const torch::nn::Module& module) {
  if (const auto* stages = dynamic_cast<const HoldsStages*>(&module)) {
    const Communicator& all = *stages->stage_ranks();
    if (!communicator) communicator = stages->stage_ranks();
    TORCH_CHECK_VALUE(communicator->world() >= all.world(),
                      error_text("saving",
                                 c10::str("got a pipeline on ", all.world(), " ranks, of which ",
                                          communicator->world(), " save and load, expected all"),
                                 communicator->rank_of(), "Leave the communicator out."));
  }
  if (!communicator) communicator = current_communicator();
  const c10::Device device = communicator->device();
  return {std::move(communicator), device};
}

// Returns whether a rank was given an optimizer; ranks of a pipeline ask each other.
bool some_rank_has(const torch::optim::Optimizer* optimizer, const torch::nn::Module& module,
                   const CheckpointRanks& ranks) {
  if (dynamic_cast<const HoldsStages*>(&module) == nullptr) return optimizer != nullptr;
  const std::vector<at::Tensor> parameters = module.parameters();
  const bool trains = std::any_of(parameters.begin(), parameters.end(),
                                  [](const at::Tensor& one) { return one.requires_grad(); });
  return some_rank_has_optimizer(optimizer != nullptr, trains, ranks);
}

// Adds the names of all ranks' parameters to `names`, by group. Collective.
void gather_names(std::vector<std::set<std::string>>& names, const CheckpointRanks& ranks) {
  for (const std::string& text : gather_texts(nlohmann::json(names).dump(), ranks)) {
    const auto theirs = nlohmann::json::parse(text).get<std::vector<std::set<std::string>>>();
    if (names.size() < theirs.size()) names.resize(theirs.size());
    for (size_t group = 0; group < theirs.size(); ++group)
      names[group].insert(theirs[group].begin(), theirs[group].end());
  }
}

// Calls `write` in a phase in which parts may be written.
template <typename Write>
void write_parts(const std::vector<HoldsParts*>& holders, const Write& write) {
  std::vector<HoldsParts*> begun;
  try {
    for (HoldsParts* holder : holders) {
      holder->begin_writing();
      begun.push_back(holder);
    }
    write();
  } catch (const std::exception& error) {
    for (HoldsParts* holder : begun) holder->abandon_writing(error.what());
    throw;
  }
  for (HoldsParts* holder : holders) holder->end_writing();
}

}  // namespace

void save_checkpoint(const std::string& path, const torch::nn::Module& module,
                     const SaveCheckpointOptions& options) {
  const torch::nn::Module& plain = plain_module(module);
  const CheckpointRanks ranks = ranks_of(options.communicator, plain);
  const RankOf where = ranks.where();
  CheckpointContent content;
  some_rank_has(options.optimizer, plain, ranks);
  together(ranks, [&] {
    const HeldParts parts = parts_in(plain, options.optimizer);
    content.tensors[kModelTensors] = tensors_of(plain, parts, where, /*loads=*/false);
    if (options.optimizer == nullptr) return;
    OptimizerToSave saved =
        optimizer_to_save(name_optimizer(*options.optimizer, names_in(plain), parts, where));
    content.tensors[kOptimizerTensors] = std::move(saved.tensors);
    content.texts[kOptimizerText] = std::move(saved.text);
  });
  if (const auto* codes = dynamic_cast<const HoldsCodes*>(&module))
    if (auto tensors = codes->codes_to_save())
      content.tensors[kCompressionTensors] = std::move(*tensors);
  if (!options.extra.empty()) content.texts[kExtraText] = options.extra;
  save_checkpoint({path, content, options.max_file_bytes}, ranks);
}

std::string load_checkpoint(const std::string& path, torch::nn::Module& module,
                            const LoadCheckpointOptions& options) {
  const torch::nn::Module& plain = plain_module(module);
  const CheckpointRanks ranks = ranks_of(options.communicator, plain);
  const RankOf where = ranks.where();
  const CheckpointReader reader(path, ranks);
  HeldParts parts;
  std::vector<CheckpointTensor> tensors;
  together(ranks, [&] {
    parts = parts_in(plain, options.optimizer);
    tensors = tensors_of(plain, parts, where, /*loads=*/true);
  });
  reader.check(kModelTensors, tensors);
  auto* codes = dynamic_cast<HoldsCodes*>(&module);
  if (codes != nullptr) together(ranks, [&] { codes->check_codes(reader); });
  std::optional<NamedOptimizer> named;
  std::optional<OptimizerToLoad> loaded;
  const bool has_optimizer = some_rank_has(options.optimizer, plain, ranks);
  if (has_optimizer) {
    const bool is_own = options.optimizer != nullptr;
    std::vector<std::set<std::string>> names;
    together(ranks, [&] {
      if (is_own) named = name_optimizer(*options.optimizer, names_in(plain), parts, where);
      if (is_own) names = named->names;
    });
    if (dynamic_cast<const HoldsStages*>(&plain) != nullptr) gather_names(names, ranks);
    together(ranks, [&] {
      if (!is_own) return;
      named->names = names;
      loaded.emplace(*named, reader);
    });
    reader.read(kOptimizerTensors, is_own ? loaded->counts() : std::vector<CheckpointTensor>());
    together(ranks, [&] {
      if (is_own) loaded->take_counts();
    });
  }
  std::vector<HoldsParts*> holders;
  find_holders(module, holders);
  if (auto* sharded = dynamic_cast<HoldsParts*>(options.optimizer)) holders.push_back(sharded);
  write_parts(holders, [&] {
    // Looks up the parts again, since begin_writing() may have moved them.
    reader.read(kModelTensors, tensors_of(plain, parts, where, /*loads=*/true));
    if (has_optimizer)
      reader.read(kOptimizerTensors, loaded ? loaded->tensors() : std::vector<CheckpointTensor>());
  });
  if (loaded) loaded->put();
  if (codes != nullptr) codes->load_codes(reader);
  return reader.text(kExtraText);
}

}  // namespace trireme
