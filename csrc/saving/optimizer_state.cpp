#include <trireme/saving/optimizer_state.h>

#include <trireme/kernels/optimizer_step.h>

#include <ATen/ATen.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <typeinfo>
#include <unordered_set>

// See [Note: the state of an optimizer in a checkpoint] in optimizer_state.h.

namespace trireme {
namespace {

using StateJson = nlohmann::ordered_json;
using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;

constexpr int64_t kMostInFp32 = int64_t{1} << 24;
constexpr double kMostInFp64 = 9007199254740992.0;  // 2^53

// Options of Python's classes that change no result, and entries of its schedulers in groups.
constexpr std::string_view kNoStepReads[] = {
    "params", "foreach", "fused",         "capturable",   "differentiable", "initial_lr",
    "max_lr", "min_lr",  "base_momentum", "max_momentum", "swa_lr"};

std::string class_name(const Optimizer& optimizer) {
  return c10::demangle(typeid(optimizer).name());
}

[[noreturn]] void refuse_optimizer(const std::string& got, const std::string& next_step,
                                   RankOf where) {
  C10_THROW_ERROR(ValueError, error_text("saving", "got " + got, where, next_step));
}

// Returns a hyperparameter as JSON.
StateJson json_of(const OptionField& field, RankOf where) {
  const auto number = [&](double value) -> StateJson {
    if (!std::isfinite(value))
      refuse_optimizer("'" + std::string(field.name) + "' of a parameter group as " +
                           std::to_string(value) + ", which JSON cannot say",
                       "Set it to a finite number.", where);
    return value;
  };
  if (const auto* flag = std::get_if<bool*>(&field.value)) return **flag;
  if (const auto* real = std::get_if<double*>(&field.value)) return number(**real);
  const auto& [first, second] = *std::get<std::tuple<double, double>*>(field.value);
  return StateJson::array({number(first), number(second)});
}

// Sets a field from JSON; returns false for a value of another type.
bool take_json(const OptionField& field, const StateJson& value) {
  if (const auto* flag = std::get_if<bool*>(&field.value)) {
    if (value.is_boolean()) **flag = value.get<bool>();
    return value.is_boolean();
  }
  if (const auto* number = std::get_if<double*>(&field.value)) {
    if (value.is_number()) **number = value.get<double>();
    return value.is_number();
  }
  const bool is_pair =
      value.is_array() && value.size() == 2 && value[0].is_number() && value[1].is_number();
  if (is_pair)
    *std::get<std::tuple<double, double>*>(field.value) = {value[0].get<double>(),
                                                           value[1].get<double>()};
  return is_pair;
}

OptimizerParamState* state_of(Optimizer& optimizer, const at::Tensor& target) {
  if (!target.defined()) return nullptr;
  const auto found = optimizer.state().find(target.unsafeGetTensorImpl());
  return found == optimizer.state().end() ? nullptr : found->second.get();
}

StateJson group_to_save(const NamedOptimizer& optimizer, size_t number) {
  StateJson group;
  StateJson& params = group["params"] = StateJson::array();
  for (const SteppedParam& param : optimizer.groups[number]) params.push_back(param.name);
  OptimizerOptions& options = optimizer.shown->param_groups()[number].options();
  for (const OptionField& field : optimizer.fields->options(options))
    group[field.name] = json_of(field, optimizer.where);
  for (const auto& [name, value] : optimizer.fields->fixed_options()) group[name] = value;
  return group;
}

// Returns a parameter's entry in the text, null without a state; adds its tensors to `tensors`.
StateJson state_to_save(const NamedOptimizer& optimizer, const SteppedParam& stepped,
                        const OptimizerOptions& options, RankOf rows,
                        std::vector<CheckpointTensor>& tensors) {
  OptimizerParamState* state = state_of(*optimizer.stepping, stepped.target);
  if (state == nullptr) return nullptr;
  if (!optimizer.fields->keeps(*state))
    refuse_optimizer("a state of '" + stepped.name + "' that " + class_name(*optimizer.stepping) +
                         " has from another class",
                     "Save an optimizer that keeps what its class in torch::optim does.",
                     optimizer.where);
  StateJson names = StateJson::array();
  StateJson values = StateJson::object();
  for (const StateField& field : optimizer.fields->state(*state, options)) {
    const std::string name = stepped.name + "." + field.name;
    if (const auto* count = std::get_if<int64_t*>(&field.value)) {
      if (**count > kMostInFp32) {
        values[field.name] = **count;
        continue;
      }
      tensors.push_back(
          {name, at::kFloat, {}, {at::scalar_tensor(static_cast<double>(**count), at::kFloat)}});
    } else {
      const at::Tensor& value = **std::get_if<at::Tensor*>(&field.value);
      if (!value.defined()) continue;
      if (value.sizes() != stepped.target.sizes())
        refuse_optimizer("optimizer state '" + name + "' of sizes " + c10::str(value.sizes()) +
                             ", expected " + c10::str(stepped.target.sizes()),
                         "Step the optimizer of this model, or clear its state.", optimizer.where);
      tensors.push_back(part_to_save(name, value, stepped.held, rows));
    }
    names.push_back(field.name);
  }
  return {{"tensors", std::move(names)}, {"values", std::move(values)}};
}

}  // namespace

NamedOptimizer name_optimizer(Optimizer& optimizer,
                              const std::unordered_map<const at::TensorImpl*, std::string>& names,
                              const HeldParts& parts, RankOf where) {
  auto* sharded = dynamic_cast<ShardedOptimizer*>(&optimizer);
  NamedOptimizer named{
      &optimizer, sharded != nullptr ? &sharded->stepping() : &optimizer, nullptr, {}, where};
  named.fields = fields_of(*named.stepping);
  if (named.fields == nullptr)
    refuse_optimizer(
        "an optimizer of class " + class_name(*named.stepping) +
            ", expected Adam, AdamW, SGD, Adagrad or RMSprop, or one derived from them",
        "Leave it out, and keep its state by torch::save.", where);
  std::unordered_set<const at::TensorImpl*> stepped;
  for (const OptimizerParamGroup& group : named.stepping->param_groups())
    for (const at::Tensor& target : group.params()) stepped.insert(target.unsafeGetTensorImpl());
  for (const OptimizerParamGroup& group : optimizer.param_groups()) {
    std::vector<SteppedParam>& members = named.groups.emplace_back();
    for (const at::Tensor& param : group.params()) {
      const auto name = names.find(param.unsafeGetTensorImpl());
      if (name == names.end())
        refuse_optimizer("an optimizer whose param_groups()[" +
                             std::to_string(named.groups.size() - 1) + "].params()[" +
                             std::to_string(members.size()) + "] of sizes " +
                             c10::str(param.sizes()) + " is no parameter of the module",
                         "Make it of the module's parameters(); under fully_shard of those of what "
                         "that returned.",
                         where);
      const auto part = parts.find(param.unsafeGetTensorImpl());
      SteppedParam member{name->second, param, param.sizes().vec(), nullptr};
      if (part != parts.end()) {
        member.held = &part->second;
        member.sizes = part->second.sizes;
        const bool is_elsewhere = part->second.values.numel() == 0 && param.numel() > 0;
        if (sharded != nullptr || is_elsewhere) member.target = part->second.values;
      }
      if (stepped.count(member.target.unsafeGetTensorImpl()) == 0) member.target = at::Tensor();
      members.push_back(std::move(member));
    }
    std::set<std::string>& all = named.names.emplace_back();
    for (const SteppedParam& member : members) all.insert(member.name);
  }
  return named;
}

OptimizerToSave optimizer_to_save(const NamedOptimizer& optimizer, RankOf rows) {
  OptimizerToSave saved;
  StateJson text{{"param_groups", StateJson::array()}, {"state", StateJson::object()}};
  for (size_t g = 0; g < optimizer.groups.size(); ++g) {
    text["param_groups"].push_back(group_to_save(optimizer, g));
    const OptimizerOptions& options = optimizer.shown->param_groups()[g].options();
    for (const SteppedParam& param : optimizer.groups[g]) {
      StateJson state = state_to_save(optimizer, param, options, rows, saved.tensors);
      if (!state.is_null()) text["state"][param.name] = std::move(state);
    }
  }
  saved.text = text.dump();
  return saved;
}

// The parsed optimizer.json.
class OptimizerToLoad::Text {
 public:
  struct Group {
    std::set<std::string> params;
    StateJson all;
  };
  struct Entry {
    std::vector<std::string> tensors;
    std::map<std::string, StateJson> values;
  };

  Text(const std::string& text, RankOf where) {
    if (text.empty())
      refuse_optimizer("a checkpoint without an optimizer", "Leave the optimizer out, or save one.",
                       where);
    try {
      const StateJson parsed = StateJson::parse(text);
      for (const StateJson& group : parsed.at("param_groups"))
        groups.push_back({group.at("params").get<std::set<std::string>>(), group});
      for (const auto& [name, entry] : parsed.at("state").items())
        states[name] = {entry.at("tensors").get<std::vector<std::string>>(),
                        entry.at("values").get<std::map<std::string, StateJson>>()};
    } catch (const StateJson::exception& error) {
      refuse_optimizer(std::string(kOptimizerText) + " in another form: " + error.what(),
                       "Restore the file, or load another checkpoint.", where);
    }
  }

  std::vector<Group> groups;
  std::unordered_map<std::string, Entry> states;
};

namespace {

// Sets `options` to those of a saved group, or throws ValueError.
void take_options(const NamedOptimizer& optimizer, const StateJson& saved,
                  OptimizerOptions& options) {
  const std::string name = class_name(*optimizer.stepping);
  const std::string next_step = "Load it into an optimizer of the class that was saved.";
  std::set<std::string> known;
  for (const OptionField& field : optimizer.fields->options(options)) {
    known.insert(field.name);
    if (!saved.contains(field.name))
      refuse_optimizer(
          "a parameter group without '" + std::string(field.name) + "', which " + name + " has",
          next_step, optimizer.where);
    if (!take_json(field, saved.at(field.name)))
      refuse_optimizer("'" + std::string(field.name) + "' of a parameter group as " +
                           saved.at(field.name).dump() + ", which " + name + " cannot take",
                       next_step, optimizer.where);
  }
  for (const auto& [option, fixed] : optimizer.fields->fixed_options()) {
    known.insert(option);
    if (saved.contains(option) && saved.at(option) != fixed)
      refuse_optimizer("'" + std::string(option) + "' of a parameter group as " +
                           saved.at(option).dump() + ", where " + name + " has " +
                           (fixed ? "true" : "false"),
                       next_step, optimizer.where);
  }
  for (const auto& [option, value] : saved.items()) {
    const bool is_read = std::find(std::begin(kNoStepReads), std::end(kNoStepReads), option) ==
                         std::end(kNoStepReads);
    if (known.count(option) == 0 && is_read && !value.is_string() && !value.is_null())
      refuse_optimizer("'" + option + "' of a parameter group, which " + name + " does not have",
                       next_step, optimizer.where);
  }
}

}  // namespace

OptimizerToLoad::OptimizerToLoad(const NamedOptimizer& optimizer, const CheckpointSource& source)
    : optimizer_(optimizer),
      text_(std::make_shared<const Text>(source.text(kOptimizerText), optimizer.where)) {
  check_groups(*text_);
  for (size_t g = 0; g < optimizer.groups.size(); ++g) {
    const auto options = optimizer.shown->param_groups()[g].options().clone();
    take_options(optimizer, text_->groups[g].all, *options);
    for (const SteppedParam& param : optimizer.groups[g])
      if (param.target.defined())
        states_.emplace_back(param.target, plan(param, *options, *text_, source));
  }
}

void OptimizerToLoad::check_groups(const Text& text) const {
  const std::string next_step = "Make the optimizer with the groups of the one that was saved.";
  for (size_t g = 0; g < optimizer_.names.size(); ++g) {
    const std::set<std::string> theirs =
        g < text.groups.size() ? text.groups[g].params : std::set<std::string>();
    const std::set<std::string>& mine = optimizer_.names[g];
    std::vector<std::string> unlike;
    std::set_symmetric_difference(mine.begin(), mine.end(), theirs.begin(), theirs.end(),
                                  std::back_inserter(unlike));
    if (!unlike.empty())
      refuse(std::string("an optimizer ") +
                 (mine.count(unlike.front()) > 0 ? "with '" : "without '") + unlike.front() +
                 "' in group " + std::to_string(g) + ", expected the groups of the checkpoint",
             next_step);
  }
  if (text.groups.size() != optimizer_.groups.size())
    refuse(std::to_string(optimizer_.groups.size()) + " parameter groups, expected the " +
               std::to_string(text.groups.size()) + " of the checkpoint",
           next_step);
}

// Makes the state that a parameter will have, with memory that is read into later; null: no state.
OptimizerToLoad::State OptimizerToLoad::plan(const SteppedParam& stepped,
                                             const OptimizerOptions& options, const Text& text,
                                             const CheckpointSource& source) {
  const std::string name = class_name(*optimizer_.stepping);
  const auto entry = text.states.find(stepped.name);
  if (entry == text.states.end()) {
    if (optimizer_.fields->needs_states())
      refuse("a checkpoint without a state of '" + stepped.name + "', which " + name + " needs",
             "Load the checkpoint of an optimizer of this class.");
    return nullptr;
  }
  State state = optimizer_.fields->make_state();
  std::unordered_map<std::string, StateField> fields;
  for (const StateField& field : optimizer_.fields->state(*state, options))
    fields.emplace(field.name, field);
  const auto take_field = [&](const std::string& key) {
    const auto found = fields.find(key);
    if (found == fields.end())
      refuse("optimizer state '" + key + "' of '" + stepped.name + "', which " + name +
                 " does not keep",
             "Load it into an optimizer of the class that was saved.");
    const StateField field = found->second;
    fields.erase(found);
    return field;
  };
  for (const auto& [key, value] : entry->second.values) {
    if (value.is_null()) continue;  // Python has no such field
    const StateField field = take_field(key);
    auto* const* count = std::get_if<int64_t*>(&field.value);
    if (count == nullptr || !value.is_number() || value.get<double>() < 0 ||
        value.get<double>() != std::floor(value.get<double>()))
      refuse("optimizer state '" + key + "' of '" + stepped.name + "' as " + value.dump(),
             "Load it into an optimizer of the class that was saved.");
    **count = value.get<int64_t>();
  }
  const auto& known = source.tensors(kOptimizerTensors);
  for (const std::string& key : entry->second.tensors) {
    const StateField field = take_field(key);
    const auto saved = known.find(stepped.name + "." + key);
    if (saved == known.end())
      refuse("a checkpoint without '" + stepped.name + "." + key + "'",
             "Restore its files, or load another checkpoint.");
    plan_tensor(stepped, field, saved->second);
  }
  for (const auto& [key, field] : fields)
    if (field.is_needed)
      refuse("a checkpoint without '" + stepped.name + "." + key + "', which " + name + " needs",
             "Load the checkpoint of an optimizer with these options.");
  return state;
}

void OptimizerToLoad::plan_tensor(const SteppedParam& stepped, const StateField& field,
                                  const CheckpointTensor& saved) {
  const bool is_count = std::holds_alternative<int64_t*>(field.value);
  const bool fits =
      is_count ? c10::multiply_integers(saved.sizes) == 1 : saved.sizes == stepped.sizes;
  if (!fits)
    refuse("optimizer state '" + saved.name + "' of sizes " + c10::str(saved.sizes) +
               ", expected " + c10::str(is_count ? std::vector<int64_t>() : stepped.sizes),
           "Load the state of the same model and optimizer.");
  if (is_count) {
    const at::Tensor count = at::empty(saved.sizes, saved.dtype);
    counts_.push_back({saved.name, saved.dtype, saved.sizes, {count}});
    count_places_.push_back(std::get<int64_t*>(field.value));
    return;
  }
  at::Tensor& value = *std::get<at::Tensor*>(field.value);
  value = memory_for(stepped, field, saved.dtype);
  tensors_.push_back(part_to_load(saved.name, saved.dtype, value, stepped.held));
}

// Returns the memory of a field, in the dtype that the optimizer's class uses: as in Python, the
// optimizer's own if it fits, else new memory.
at::Tensor OptimizerToLoad::memory_for(const SteppedParam& stepped, const StateField& field,
                                       at::ScalarType saved) const {
  const at::Tensor target = stepped.target.detach();
  at::ScalarType dtype = saved;
  if (target.is_floating_point() && at::isFloatingType(saved)) {
    const bool is_wide = dynamic_cast<const KeepsWideStates*>(optimizer_.stepping) != nullptr;
    dtype = is_wide ? optimizer_state_dtype(target.scalar_type()) : target.scalar_type();
  }
  OptimizerParamState* present = state_of(*optimizer_.stepping, stepped.target);
  if (present != nullptr && optimizer_.fields->keeps(*present)) {
    const OptimizerOptions& options = optimizer_.shown->param_groups().front().options();
    for (const StateField& state_field : optimizer_.fields->state(*present, options)) {
      auto* const* value = std::get_if<at::Tensor*>(&state_field.value);
      if (value == nullptr || std::string_view(state_field.name) != field.name) continue;
      const at::Tensor& held = **value;
      if (held.defined() && held.sizes() == target.sizes() && held.scalar_type() == dtype &&
          held.device() == target.device())
        return held.detach();
    }
  }
  return at::empty_like(target, target.options().dtype(dtype));
}

void OptimizerToLoad::take_counts() {
  for (size_t i = 0; i < counts_.size(); ++i) {
    const auto count = counts_[i].part.values.item<double>();
    if (!(count >= 0 && count <= kMostInFp64 && count == std::floor(count)))
      refuse("optimizer state '" + counts_[i].name + "' as " + std::to_string(count) +
                 ", expected a count of steps",
             "Restore its files, or load another checkpoint.");
    *count_places_[i] = static_cast<int64_t>(count);
  }
}

void OptimizerToLoad::put() {
  for (size_t g = 0; g < optimizer_.groups.size(); ++g) {
    take_options(optimizer_, text_->groups[g].all, optimizer_.shown->param_groups()[g].options());
    if (optimizer_.stepping != optimizer_.shown)
      take_options(optimizer_, text_->groups[g].all,
                   optimizer_.stepping->param_groups()[g].options());
  }
  for (auto& [target, state] : states_) {
    if (state != nullptr) {
      optimizer_.stepping->state()[target.unsafeGetTensorImpl()] = std::move(state);
    } else {
      optimizer_.stepping->state().erase(target.unsafeGetTensorImpl());
    }
  }
}

void OptimizerToLoad::refuse(const std::string& got, const std::string& next_step) const {
  refuse_optimizer(got, next_step, optimizer_.where);
}

}  // namespace trireme
