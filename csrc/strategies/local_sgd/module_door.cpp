#include <trireme/strategies/local_sgd/module_door.h>

#include <trireme/common/error.h>
#include <trireme/module/averages_gradients.h>
#include <trireme/module/module_parameters.h>
#include <trireme/saving/module_content.h>
#include <trireme/sync/table_parameters.h>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <numeric>
#include <unordered_set>
#include <utility>

namespace trireme {
namespace {

using Impls = std::unordered_set<const at::TensorImpl*>;

Impls parameters_of(const torch::optim::Optimizer& optimizer) {
  Impls found;
  for (const torch::optim::OptimizerParamGroup& group : optimizer.param_groups())
    for (const at::Tensor& parameter : group.params())
      found.insert(parameter.unsafeGetTensorImpl());
  return found;
}

bool can_be_averaged(const at::Tensor& tensor) {
  return tensor.is_floating_point() || tensor.is_complex();
}

std::unique_ptr<torch::optim::Optimizer> default_outer(const std::vector<at::Tensor>& parameters) {
  const auto options = torch::optim::SGDOptions(0.7).momentum(0.9).nesterov(true);
  return std::make_unique<torch::optim::SGD>(parameters, options);
}

}  // namespace

ModuleDoor::ModuleDoor(const TrainedModule& trained)
    : trained_(trained), plain_(plain_module(*trained.module)) {
  const Impls stepped = parameters_of(*trained_.optimizer);
  NamedParameters all = named_parameters(plain_);
  for (size_t i = 0; i < all.names.size(); ++i) {
    const at::Tensor& tensor = all.tensors[i];
    const bool trains = tensor.requires_grad() || stepped.contains(tensor.unsafeGetTensorImpl());
    if (!trains || !can_be_averaged(tensor)) continue;
    TORCH_CHECK_VALUE(!table_of(tensor),
                      error_text(kRoundsArea,
                                 "got '" + all.names[i] +
                                     "', which a parameter server keeps, expected one of this rank",
                                 {}, "Leave that module out of the rounds."));
    names_.push_back(all.names[i]);
    tensors_.push_back(tensor);
  }
  check_optimizer();
}

void ModuleDoor::check_optimizer() const {
  Impls known;
  for (const at::Tensor& parameter : plain_.parameters())
    known.insert(parameter.unsafeGetTensorImpl());
  for (const at::TensorImpl* stepped : parameters_of(*trained_.optimizer))
    TORCH_CHECK_VALUE(known.contains(stepped),
                      error_text(kRoundsArea,
                                 "got an optimizer over other parameters, expected those of the "
                                 "module",
                                 {}, "Pass the optimizer that trains this module."));
  TORCH_CHECK_VALUE(!names_.empty(),
                    error_text(kRoundsArea, "got a module without parameters to train", {},
                               "Pass the module that the optimizer trains."));
}

std::vector<int64_t> ModuleDoor::bytes() const {
  const HeldParts parts = held_parts_in(plain_, trained_.optimizer);
  std::vector<int64_t> found;
  for (const at::Tensor& tensor : tensors_) {
    const auto part = parts.find(tensor.unsafeGetTensorImpl());
    const std::vector<int64_t> sizes =
        part == parts.end() ? tensor.sizes().vec() : part->second.sizes;
    found.push_back(c10::multiply_integers(sizes) * static_cast<int64_t>(tensor.element_size()));
  }
  return found;
}

std::vector<RoundParameter> ModuleDoor::make_parameters(const WorkerRanks& ranks) {
  std::vector<int64_t> senders(tensors_.size(), 0);
  const bool deals = ranks.have_all && ranks.inside;
  if (deals) senders = deal_by_bytes(bytes(), ranks.inside->world());
  std::vector<size_t> all(tensors_.size());
  std::iota(all.begin(), all.end(), size_t{0});
  const std::vector<at::Tensor> here = values(all);
  std::vector<RoundParameter> parameters;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const bool is_mine = !deals || senders[i] == ranks.inside->rank();
    anchors_.push_back(is_mine && here[i].numel() > 0 ? at::empty_like(here[i].detach())
                                                      : at::Tensor());
    parameters.push_back({names_[i], tensors_[i], anchors_.back(), senders[i]});
  }
  return parameters;
}

std::vector<Fragment> ModuleDoor::fragments_of(
    const std::vector<std::shared_ptr<torch::nn::Module>>& modules) const {
  std::vector<Fragment> fragments;
  std::vector<int64_t> times(tensors_.size());
  for (const auto& module : modules) {
    Impls inside;
    for (const at::Tensor& parameter : module->parameters())
      inside.insert(parameter.unsafeGetTensorImpl());
    fragments.emplace_back();
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (!inside.contains(tensors_[i].unsafeGetTensorImpl())) continue;
      fragments.back().push_back(i);
      ++times[i];
    }
  }
  for (size_t i = 0; i < tensors_.size(); ++i)
    TORCH_CHECK_VALUE(times[i] == 1, error_text(kRoundsArea,
                                                c10::str("got fragments of which ", times[i],
                                                         " have '", names_[i], "', expected one"),
                                                {}, "Pass modules that have each parameter once."));
  return fragments;
}

// Throws ValueError unless `optimizer` steps all parameters, or all of a fragment, and no others.
void ModuleDoor::check_outer(const torch::optim::Optimizer& optimizer,
                             const std::optional<Fragment>& fragment) const {
  Impls known, needed;
  for (const at::Tensor& parameter : plain_.parameters())
    known.insert(parameter.unsafeGetTensorImpl());
  const Impls stepped = parameters_of(optimizer);
  for (const at::TensorImpl* one : stepped)
    TORCH_CHECK_VALUE(known.contains(one),
                      error_text(kRoundsArea,
                                 "got outer_optimizer over other parameters, expected those of the "
                                 "module",
                                 {}, "Pass the optimizer that was made for this module."));
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const bool is_needed =
        !fragment || std::find(fragment->begin(), fragment->end(), i) != fragment->end();
    TORCH_CHECK_VALUE(
        !is_needed || stepped.contains(tensors_[i].unsafeGetTensorImpl()),
        error_text(kRoundsArea,
                   "got outer_optimizer without '" + names_[i] +
                       "', expected one over all parameters that it is to step",
                   {}, "Make it over all parameters, or over those of its fragment."));
  }
}

void ModuleDoor::take_outer(const std::vector<torch::optim::Optimizer*>& optimizers,
                            const std::vector<Fragment>& fragments) {
  std::unordered_map<const at::TensorImpl*, at::Tensor> anchors;
  for (size_t i = 0; i < tensors_.size(); ++i)
    anchors.emplace(tensors_[i].unsafeGetTensorImpl(), anchors_[i]);
  std::vector<torch::optim::Optimizer*> given = optimizers;
  if (given.empty()) {
    own_outer_ = default_outer(tensors_);
    given.push_back(own_outer_.get());
  }
  for (size_t i = 0; i < given.size(); ++i) {
    check_outer(*given[i], given.size() == 1 ? std::nullopt : std::optional(fragments[i]));
    outer_.push_back(std::make_unique<OuterOptimizer>(*given[i], anchors));
  }
}

std::shared_ptr<Communicator> ModuleDoor::averages_over() const {
  auto* module = dynamic_cast<AveragesGradients*>(trained_.module);
  return module != nullptr ? module->averages_over() : nullptr;
}

std::vector<RoundPart> ModuleDoor::parts() const {
  const HeldParts held = held_parts_in(plain_, trained_.optimizer);
  std::vector<RoundPart> found;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const auto part = held.find(tensors_[i].unsafeGetTensorImpl());
    if (part != held.end())
      found.push_back({names_[i], part->second.sizes, part->second.first});
    else
      found.push_back({names_[i], tensors_[i].sizes().vec(),
                       std::vector<int64_t>(static_cast<size_t>(tensors_[i].dim()), 0)});
  }
  return found;
}

bool ModuleDoor::shards_all() const {
  const HeldParts parts = held_parts_in(plain_, trained_.optimizer);
  return std::all_of(tensors_.begin(), tensors_.end(), [&](const at::Tensor& tensor) {
    return parts.contains(tensor.unsafeGetTensorImpl());
  });
}

std::vector<at::Tensor> ModuleDoor::values(const std::vector<size_t>& parameters) {
  const HeldParts parts = held_parts_in(plain_, trained_.optimizer);
  const NamedParameters present = named_parameters(plain_);
  std::unordered_map<std::string, at::Tensor> by_name;
  for (size_t i = 0; i < present.names.size(); ++i)
    by_name.emplace(present.names[i], present.tensors[i]);
  std::vector<at::Tensor> found;
  for (const size_t index : parameters) {
    const auto now = by_name.find(names_[index]);
    TORCH_CHECK_VALUE(now != by_name.end() && now->second.is_same(tensors_[index]),
                      error_text(kRoundsArea,
                                 "got '" + names_[index] +
                                     "', which was replaced, expected the parameter of the begin",
                                 {}, "Make the rounds anew after a parameter was replaced."));
    const auto part = parts.find(tensors_[index].unsafeGetTensorImpl());
    found.push_back(part == parts.end() ? tensors_[index] : part->second.values);
  }
  return found;
}

void ModuleDoor::write(const std::function<void()>& write) { write_held_parts(trained_, write); }

void ModuleDoor::step_outer(size_t fragment, const std::vector<size_t>& parameters,
                            const std::vector<at::Tensor>& gradients) {
  std::vector<at::Tensor> anchors;
  for (const size_t index : parameters) anchors.push_back(anchors_[index]);
  outer_[outer_.size() == 1 ? 0 : fragment]->step(anchors, gradients);
}

}  // namespace trireme
