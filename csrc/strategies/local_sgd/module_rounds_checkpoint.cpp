#include <trireme/common/error.h>
#include <trireme/saving/checkpoint_files.h>
#include <trireme/saving/module_content.h>
#include <trireme/saving/optimizer_state.h>
#include <trireme/saving/prefixed_source.h>
#include <trireme/strategies/local_sgd/module_door.h>
#include <trireme/strategies/local_sgd/module_rounds.h>
#include <trireme/strategies/local_sgd/rounds_checkpoint.h>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <optional>
#include <utility>

namespace trireme {
namespace {

using NamesOfTensors = std::unordered_map<const at::TensorImpl*, std::string>;

// The parameters of an optimizer as it knows them.
struct SteppedTensors {
  NamesOfTensors names = {};
  HeldParts parts = {};
};

// Returns the parameters of the inner optimizer: parts of those that a strategy shards.
SteppedTensors inner_tensors(const ModuleDoor& door) {
  const torch::nn::Module& plain = plain_module(*door.trained().module);
  SteppedTensors stepped{{}, held_parts_in(plain, door.trained().optimizer)};
  for (const auto& item : plain.named_parameters())
    stepped.names.try_emplace(item.value().unsafeGetTensorImpl(), item.key());
  return stepped;
}

// Returns the anchors that an outer optimizer steps.
SteppedTensors outer_tensors(const ModuleDoor& door, const OuterOptimizer& outer) {
  SteppedTensors stepped;
  const std::vector<RoundPart> parts = door.parts();
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto target = outer.targets().find(door.tensor(i).unsafeGetTensorImpl());
    if (target == outer.targets().end()) continue;
    const at::TensorImpl* impl = target->second.unsafeGetTensorImpl();
    stepped.names.emplace(impl, parts[i].name);
    stepped.parts.emplace(impl, HeldPart{target->second, parts[i].sizes, parts[i].first});
  }
  for (const auto& item : plain_module(*door.trained().module).named_parameters()) {
    const auto target = outer.targets().find(item.value().unsafeGetTensorImpl());
    if (target != outer.targets().end())  // frozen ones
      stepped.names.try_emplace(target->second.unsafeGetTensorImpl(), item.key());
  }
  return stepped;
}

// One optimizer's part of a checkpoint of rounds.
struct OptimizerPlace {
  torch::optim::Optimizer& optimizer;
  SteppedTensors stepped;
  std::string prefix;
  int64_t worker;  // -1: all workers have the same
};

std::vector<OptimizerPlace> optimizers_of(const ModuleDoor& door, int64_t worker) {
  std::vector<OptimizerPlace> places;
  places.push_back({*door.trained().optimizer, inner_tensors(door),
                    worker_prefix(worker) + "optimizer:", worker});
  for (size_t i = 0; i < door.outer().size(); ++i)
    places.push_back({door.outer()[i]->optimizer(), outer_tensors(door, *door.outer()[i]),
                      "outer " + std::to_string(i) + ":", -1});
  return places;
}

void add_optimizer(const OptimizerPlace& place, const CheckpointRanks& ranks,
                   std::vector<CheckpointTensor>& tensors) {
  OptimizerToSave saved;
  together(ranks, [&] {
    saved = optimizer_to_save(
        name_optimizer(place.optimizer, place.stepped.names, place.stepped.parts, ranks.where()),
        /*rows=*/{0, 1});
  });
  const std::string text = merge_texts_of(place.worker, saved.text, ranks);
  for (CheckpointTensor& tensor : saved.tensors) {
    tensor.name = place.prefix + tensor.name;
    tensors.push_back(std::move(tensor));
  }
  tensors.push_back(text_as_tensor(place.prefix, text));
}

void load_optimizer(const OptimizerPlace& place, const CheckpointSource& source,
                    const CheckpointRanks& ranks) {
  const PrefixedSource own(source, kRoundsTensors, place.prefix, ranks);
  std::optional<NamedOptimizer> named;
  std::optional<OptimizerToLoad> loaded;
  together(ranks, [&] {
    named =
        name_optimizer(place.optimizer, place.stepped.names, place.stepped.parts, ranks.where());
    loaded.emplace(*named, own);
  });
  own.read(kOptimizerTensors, loaded->counts());
  together(ranks, [&] { loaded->take_counts(); });
  own.read(kOptimizerTensors, loaded->tensors());
  loaded->put();
}

torch::optim::Optimizer& stepping(torch::optim::Optimizer& optimizer) {
  auto* sharded = dynamic_cast<ShardedOptimizer*>(&optimizer);
  return sharded != nullptr ? sharded->stepping() : optimizer;
}

}  // namespace

void ModuleRounds::check_same_optimizer(const TrainedModule& trained) const {
  const TrainedModule& own = door_->trained();
  TORCH_CHECK_VALUE(
      trained.optimizer == own.optimizer &&
          &plain_module(*trained.module) == &plain_module(*own.module),
      error_text(kRoundsArea, "got rounds over another module or optimizer",
                 rounds_->workers().rank_of(), "Pass those that the rounds were made for."));
}

void ModuleRounds::add_to(CheckpointContent& content, const TrainedModule& trained,
                          const CheckpointRanks& ranks) {
  std::vector<RoundPart> parts;
  together(ranks, [&] {
    check_same_optimizer(trained);
    if (!rounds_->has_agreed()) rounds_->take_anchors();
    parts = door_->parts();
    rounds_->wait_for_fragment();
    put_anchors(*rounds_, parts, content.tensors[kModelTensors]);
    content.tensors[kRoundsTensors] = rounds_to_save(*rounds_, parts);
  });
  for (const OptimizerPlace& place : optimizers_of(*door_, rounds_->workers().rank()))
    add_optimizer(place, ranks, content.tensors[kRoundsTensors]);
}

void ModuleRounds::load(const CheckpointSource& source, const TrainedModule& trained,
                        const CheckpointRanks& ranks) {
  together(ranks, [&] { check_same_optimizer(trained); });
  const bool has_rounds = source.has(kRoundsTensors);
  load_content(source, {trained.module, trained.optimizer, /*loads_state=*/!has_rounds},
               LoadedOn::kAllRanks, ranks);
  if (!has_rounds) {
    rounds_->take_anchors();
    return rounds_->restore({}, std::nullopt);
  }
  const bool is_same = load_rounds(*rounds_, door_->parts(), source);
  if (!is_same) stepping(optimizer_).state().clear();
  for (const OptimizerPlace& place : optimizers_of(*door_, rounds_->workers().rank()))
    if (is_same || place.worker < 0) load_optimizer(place, source, ranks);
}

}  // namespace trireme
