#include <trireme/saving/module_content.h>

#include <trireme/comm/launch/launch.h>
#include <trireme/common/error.h>
#include <trireme/memory/snapshot.h>
#include <trireme/optim/write_gate.h>
#include <trireme/saving/held_parts.h>
#include <trireme/saving/optimizer_state.h>
#include <trireme/saving/saved_codes.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
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
    const at::Tensor& values = held != nullptr ? held->values : tensor;
    tensors.push_back(part_to_load(name, tensor.scalar_type(), values, held));
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

bool has_stages(const torch::nn::Module* module) {
  return dynamic_cast<const HoldsStages*>(module) != nullptr;
}

bool trains_any(const torch::nn::Module& plain) {
  const std::vector<at::Tensor> all = plain.parameters();
  return std::any_of(all.begin(), all.end(),
                     [](const at::Tensor& it) { return it.requires_grad(); });
}

// Returns whether any rank has an optimizer. Collective. Throws ValueError on all ranks if one has
// an optimizer and another one, with parameters to train, none.
bool some_rank_has_optimizer(const TrainedModule& trained, const CheckpointRanks& ranks) {
  const bool trains = trained.module != nullptr && trains_any(plain_module(*trained.module));
  return some_rank_has_optimizer(trained.optimizer != nullptr, trains, ranks);
}

void copy_all(std::vector<CheckpointTensor>& tensors) {
  for (CheckpointTensor& tensor : tensors)
    if (tensor.part.values.defined()) tensor.part.values = tensor.part.values.clone();
}

// Copies the buffers in a content, and the rows of parameters that other ranks step, too: those of
// a sharded optimizer that is not saved.
void copy_written(const torch::nn::Module& module, const HeldParts& parts,
                  CheckpointContent& content) {
  std::set<std::string> names;
  for (const auto& item : module.named_buffers()) names.insert(name_in_whole(module, item.key()));
  for (const auto& item : module.named_parameters())
    if (part_of(parts, item.value()) == nullptr && gate_of(item.value()) != nullptr)
      names.insert(name_in_whole(module, item.key()));
  for (CheckpointTensor& tensor : content.tensors.at(kModelTensors))
    if (names.count(tensor.name) > 0 && tensor.part.values.defined())
      tensor.part.values = tensor.part.values.clone();
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

// A state of an optimizer that is loaded in two steps: what it counts, then its tensors.
class OptimizerLoading {
 public:
  // Collective. `asks`: whether ranks may have different parameters.
  OptimizerLoading(const CheckpointSource& source, const TrainedModule& trained,
                   const HeldParts& parts, bool asks, const CheckpointRanks& ranks)
      : source_(source) {
    std::vector<std::set<std::string>> names;
    together(ranks, [&] {
      if (trained.optimizer == nullptr) return;
      named_ = name_optimizer(*trained.optimizer, names_in(plain_module(*trained.module)), parts,
                              ranks.where());
      names = named_->names;
    });
    if (asks) gather_names(names, ranks);
    together(ranks, [&] {
      if (!named_) return;
      named_->names = names;
      loaded_.emplace(*named_, source);
    });
    source.read(kOptimizerTensors, loaded_ ? loaded_->counts() : std::vector<CheckpointTensor>());
    together(ranks, [&] {
      if (loaded_) loaded_->take_counts();
    });
  }

  // Collective.
  void read() const {
    source_.read(kOptimizerTensors, loaded_ ? loaded_->tensors() : std::vector<CheckpointTensor>());
  }
  void put() {
    if (loaded_) loaded_->put();
  }

 private:
  const CheckpointSource& source_;
  std::optional<NamedOptimizer> named_;
  std::optional<OptimizerToLoad> loaded_;
};

// Returns the tensors to load into; none without a module.
std::vector<CheckpointTensor> tensors_to_load(const TrainedModule& trained, const HeldParts& parts,
                                              RankOf where) {
  if (trained.module == nullptr) return {};
  return tensors_of(plain_module(*trained.module), parts, where, /*loads=*/true);
}

std::array<const HoldsCodes*, 2> code_holders(const TrainedModule& trained) {
  return {dynamic_cast<const HoldsCodes*>(trained.module),
          dynamic_cast<const HoldsCodes*>(trained.optimizer)};
}

bool holds_codes(const TrainedModule& trained) {
  return trained.module != nullptr && code_holders(trained) != decltype(code_holders(trained)){};
}

// Returns the coders of gradients of a module and its optimizer, with the module's names.
std::vector<KeptCodes> codes_of(const TrainedModule& trained) {
  std::vector<KeptCodes> codes;
  for (const HoldsCodes* holder : code_holders(trained)) {
    if (holder == nullptr) continue;
    for (KeptCodes& one : holder->kept_codes()) codes.push_back(std::move(one));
  }
  const auto names = names_in(plain_module(*trained.module));
  for (KeptCodes& one : codes) {
    for (size_t i = 0; i < one.tensors.size(); ++i) {
      const auto found = names.find(one.tensors[i].unsafeGetTensorImpl());
      if (found != names.end()) one.parameters[i].name = found->second;
    }
  }
  return codes;
}

// Adds this rank's part of an optimizer's state; of what all ranks have the rows of `rows`.
void add_optimizer(const TrainedModule& trained, const HeldParts& parts, RankOf rows, RankOf where,
                   CheckpointContent& content) {
  if (trained.optimizer == nullptr) return;
  const auto names = names_in(plain_module(*trained.module));
  OptimizerToSave saved =
      optimizer_to_save(name_optimizer(*trained.optimizer, names, parts, where), rows);
  content.tensors[kOptimizerTensors] = std::move(saved.tensors);
  content.texts[kOptimizerText] = std::move(saved.text);
}

constexpr const char* kFrozenName = "layers";

CheckpointTensor frozen_tensor(const at::Tensor& numbers) {
  return {kFrozenName, at::kLong, numbers.sizes().vec(), {numbers, {0}}};
}

// Returns the module that freezes, where it does and a checkpoint says how far; else null.
FreezesLayers* freezing_of(const CheckpointSource& source, const TrainedModule& trained) {
  if (trained.module == nullptr || !source.tensors(kFrozenTensors).contains(kFrozenName))
    return nullptr;
  auto* freezing = dynamic_cast<FreezesLayers*>(trained.module);
  return freezing != nullptr && freezing->frozen_numbers().defined() ? freezing : nullptr;
}

void load_frozen(const CheckpointSource& source, FreezesLayers& freezing,
                 const CheckpointRanks& ranks) {
  const at::Tensor numbers =
      at::empty(source.tensors(kFrozenTensors).at(kFrozenName).sizes, at::kLong);
  source.read(kFrozenTensors, {frozen_tensor(numbers)});
  const int64_t own = freezing.frozen_numbers()[0].item<int64_t>();
  together(ranks, [&] {
    const int64_t saved = numbers.numel() > 1 ? numbers[0].item<int64_t>() : -1;
    TORCH_CHECK_VALUE(
        saved == own,
        error_text("saving",
                   c10::str("got a checkpoint of ", saved, " layers that freeze, expected ", own),
                   ranks.where(), "Give the layers of the run that was saved."));
  });
  freezing.load_frozen_numbers(numbers);
}

}  // namespace

const torch::nn::Module& plain_module(const torch::nn::Module& module) {
  const auto* wrapper = dynamic_cast<const WrapsModule*>(&module);
  return wrapper != nullptr ? plain_module(wrapper->wrapped()) : module;
}

HeldParts held_parts_in(const torch::nn::Module& module, const torch::optim::Optimizer* optimizer) {
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

void write_held_parts(const TrainedModule& trained, const std::function<void()>& write) {
  std::vector<HoldsParts*> holders;
  if (trained.module != nullptr) {
    keep_snapshots_of(written_with(trained));
    find_holders(*trained.module, holders);
  }
  if (auto* sharded = dynamic_cast<HoldsParts*>(trained.optimizer)) holders.push_back(sharded);
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

CheckpointContent content_of_rank(const TrainedModule& trained, RankOf where,
                                  WrittenBeside written) {
  const torch::nn::Module& plain = plain_module(*trained.module);
  CheckpointContent content;
  const HeldParts parts = held_parts_in(plain, trained.optimizer);
  content.tensors[kModelTensors] = tensors_of(plain, parts, where, /*loads=*/false);
  if (written == WrittenBeside::kCopied) copy_written(plain, parts, content);
  add_optimizer(trained, parts, where, where, content);
  if (const auto* freezing = dynamic_cast<const FreezesLayers*>(trained.module)) {
    const at::Tensor numbers = where.rank == 0 ? freezing->frozen_numbers() : at::Tensor();
    if (numbers.defined()) content.tensors[kFrozenTensors] = {frozen_tensor(numbers)};
  }
  if (!holds_codes(trained)) return content;
  if (auto codes = codes_to_save(codes_of(trained))) {
    if (written == WrittenBeside::kCopied) copy_all(*codes);
    content.tensors[kCompressionTensors] = std::move(*codes);
  }
  return content;
}

CheckpointContent content_to_save(const TrainedModule& trained, const CheckpointRanks& ranks) {
  if (const auto check = check_of_stages(trained)) check(ranks);
  CheckpointContent content;
  together(ranks,
           [&] { content = content_of_rank(trained, ranks.where(), WrittenBeside::kInPlace); });
  return content;
}

std::vector<at::Tensor> written_with(const TrainedModule& trained) {
  std::vector<at::Tensor> tensors = plain_module(*trained.module).parameters();
  const auto add = [&](const torch::optim::Optimizer& optimizer) {
    for (const torch::optim::OptimizerParamGroup& group : optimizer.param_groups())
      tensors.insert(tensors.end(), group.params().begin(), group.params().end());
  };
  if (trained.optimizer != nullptr) add(*trained.optimizer);
  if (auto* sharded = dynamic_cast<ShardedOptimizer*>(trained.optimizer)) add(sharded->stepping());
  return tensors;
}

std::function<void(const CheckpointRanks&)> check_of_stages(const TrainedModule& trained) {
  const torch::nn::Module& plain = plain_module(*trained.module);
  if (!has_stages(&plain)) return {};
  const bool has = trained.optimizer != nullptr, trains = trains_any(plain);
  return
      [has, trains](const CheckpointRanks& ranks) { some_rank_has_optimizer(has, trains, ranks); };
}

HeldContent content_held(const TrainedModule& trained, const CheckpointRanks& ranks) {
  HeldContent held;
  together(ranks, [&] {
    if (trained.module == nullptr) return;
    const torch::nn::Module& plain = plain_module(*trained.module);
    const RankOf where = ranks.where();
    const HeldParts parts = held_parts_in(plain, trained.optimizer);
    held.content.tensors[kModelTensors] = tensors_of(plain, parts, where, /*loads=*/true);
    for (const auto& item : plain.named_buffers())
      held.of_lowest.insert(name_in_whole(plain, item.key()));
    add_optimizer(trained, parts, /*rows=*/{0, 1}, where, held.content);
  });
  return held;
}

void load_content(const CheckpointSource& source, const TrainedModule& trained, LoadedOn loaded_on,
                  const CheckpointRanks& ranks) {
  const torch::nn::Module* plain =
      trained.module == nullptr ? nullptr : &plain_module(*trained.module);
  const bool asks = loaded_on == LoadedOn::kSomeRanks || has_stages(plain);
  const RankOf where = ranks.where();
  HeldParts parts;
  std::vector<CheckpointTensor> tensors;
  together(ranks, [&] {
    if (plain != nullptr) parts = held_parts_in(*plain, trained.optimizer);
    tensors = tensors_to_load(trained, parts, where);
  });
  const bool has_codes = loaded_on == LoadedOn::kAllRanks && holds_codes(trained);
  const bool has_state = trained.optimizer != nullptr && trained.loads_state;
  const bool has_optimizer = asks ? some_rank_has_optimizer(trained, ranks) : has_state;
  std::vector<std::string> kinds{kModelTensors};
  if (has_optimizer) kinds.emplace_back(kOptimizerTensors);
  if (has_codes) kinds.emplace_back(kCompressionTensors);
  FreezesLayers* freezing = freezing_of(source, trained);
  if (freezing != nullptr) kinds.emplace_back(kFrozenTensors);
  source.verify(kinds);
  source.check(kModelTensors, tensors);
  std::vector<KeptCodes> codes;
  if (has_codes) {
    together(ranks, [&] {
      codes = codes_of(trained);
      check_codes(codes, source, where);
    });
  }
  std::optional<OptimizerLoading> optimizer;
  if (has_optimizer) optimizer.emplace(source, trained, parts, asks, ranks);
  write_held_parts(trained, [&] {
    // Looks up the parts again, since begin_writing() may have moved them.
    source.read(kModelTensors, tensors_to_load(trained, parts, where));
    if (optimizer) optimizer->read();
  });
  if (optimizer) optimizer->put();
  load_codes(codes, source, where);
  if (freezing != nullptr) load_frozen(source, *freezing, ranks);
}

}  // namespace trireme
