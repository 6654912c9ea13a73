#include <trireme/pipetransformer/pipe_transformer.h>

#include <trireme/common/error.h>
#include <trireme/common/exception_text.h>
#include <trireme/module/averages_gradients.h>
#include <trireme/module/meets_ranks.h>
#include <trireme/optim/write_gate.h>
#include <trireme/pipetransformer/layer_costs.h>
#include <trireme/pipetransformer/layer_memory.h>
#include <trireme/pipetransformer/layer_state.h>
#include <trireme/pipetransformer/rank_agreement.h>
#include <trireme/sync/table_parameters.h>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace trireme {
namespace {

bool holds(const std::vector<int64_t>& ranks, int64_t rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

int64_t rows_of(const at::Tensor& batch) {
  return batch.defined() && batch.dim() > 0 ? batch.size(0) : 0;
}

std::vector<std::string> names_of(const torch::nn::Sequential& layers) {
  std::vector<std::string> names;
  for (const auto& item : layers->named_children()) names.push_back(item.key());
  return names;
}

// A layer without parameters is frozen with the one in front of it; see FrozenLayers.
std::vector<int64_t> ends_of_frozen(const torch::nn::Sequential& layers) {
  std::vector<int64_t> ends;
  int64_t number = 0;
  bool has_begun = false;
  for (const auto& layer : layers->children()) {
    const bool begins = !layer->parameters().empty();
    if (begins && has_begun) ends.push_back(number);
    has_begun = has_begun || begins;
    ++number;
  }
  ends.push_back(number);
  return ends;
}

ElasticOptions elastic_options(const torch::nn::Sequential& layers,
                               const PipeTransformerOptions& options) {
  ElasticOptions elastic;
  elastic.layers = names_of(layers);
  elastic.global_batch = options.global_batch;
  elastic.chunks = options.chunks;
  elastic.pipe = options.pipe;
  elastic.replicas = options.replicas;
  elastic.cached = options.cache != nullptr;
  elastic.costs = options.costs;
  return elastic;
}

}  // namespace

PipeTransformerImpl::PipeTransformerImpl(torch::nn::Sequential layers,
                                         std::shared_ptr<Communicator> ranks, PipelineLoss loss,
                                         torch::optim::Optimizer& optimizer,
                                         PipeTransformerOptions options)
    : layers_(std::move(layers)),
      ranks_(std::move(ranks)),
      optimizer_(&optimizer),
      options_(std::move(options)),
      loss_(std::move(loss)) {
  work_on_ranks(
      "layers and an optimizer", "Give all ranks the same.",
      [this] {
        check_layer_states(*optimizer_);
        check_modules();
        check_optimizer();
        check_shared();
        if (options_.freeze)
          frozen_layers_ = std::make_unique<FrozenLayers>(layers_.ptr(), std::vector<FreezeLayer>(),
                                                          optimizer_, options_.freeze->eval_frozen);
      },
      ranks_.get());
  course_ = std::make_unique<ElasticCourse>(elastic_options(layers_, options_), ranks_);
  if (options_.freeze)
    freezing_ = std::make_unique<FreezeCourse>(frozen_layers_->names(), *options_.freeze, ranks_);
  frozen_ends_ = ends_of_frozen(layers_);
  for (const auto& item : layers_->named_children()) register_module(item.key(), item.value());
  if (!course_->needs_costs()) move_to(course_->next_plan(0));
}

// Refuses modules and parameters that are of certain ranks: layers come to others.
void PipeTransformerImpl::check_modules() const {
  if (const auto averaging = averaging_module_in(*layers_))
    refuse_elastic("got a DistributedDataParallel at '" + *averaging +
                       "', expected layers that a run averages",
                   ranks_.get(), "Give the module in it.");
  if (const std::string meeting = meeting_of_ranks(*layers_, /*most=*/0); !meeting.empty())
    refuse_elastic("got " + meeting + ", whose ranks change from plan to plan", ranks_.get(),
                   "Keep BatchNorm, whose statistics are those of a micro-batch.");
  for (const auto& item : layers_->named_parameters()) {
    if (!table_of(item.value())) continue;
    refuse_elastic("got '" + item.key() +
                       "', which a parameter server keeps, expected it to move with its layer",
                   ranks_.get(), "Leave out the table.");
  }
}

void PipeTransformerImpl::check_optimizer() const {
  std::unordered_set<const at::TensorImpl*> stepped, own;
  for (const auto& group : optimizer_->param_groups())
    for (const at::Tensor& parameter : group.params())
      stepped.insert(parameter.unsafeGetTensorImpl());
  for (const auto& item : layers_->named_parameters()) {
    own.insert(item.value().unsafeGetTensorImpl());
    if (stepped.count(item.value().unsafeGetTensorImpl()) == 0 && item.value().requires_grad())
      refuse_elastic("got an optimizer without '" + item.key() + "', expected that of all layers",
                     ranks_.get(), "Make it of the parameters of the whole net, on every rank.");
  }
  const auto others = std::count_if(stepped.begin(), stepped.end(),
                                    [&](const at::TensorImpl* one) { return own.count(one) == 0; });
  if (others > 0)
    refuse_elastic(c10::str("got an optimizer of ", others, " parameters that are in no layer"),
                   ranks_.get(), "Step those by an optimizer of their own.");
}

void PipeTransformerImpl::check_shared() const {
  std::unordered_map<const at::TensorImpl*, std::pair<size_t, std::string>> first;
  const std::vector<std::string> names = names_of(layers_);
  for (size_t layer = 0; layer < names.size(); ++layer) {
    for (const auto& [key, tensor] : tensors_of(layer)) {
      const std::string name = names[layer] + "." + key;
      const auto [known, is_new] = first.try_emplace(tensor.unsafeGetTensorImpl(), layer, name);
      if (!is_new && known->second.first != layer)
        refuse_elastic("got '" + name + "', which is '" + known->second.second +
                           "' as well, expected no layer to share a tensor with another one",
                       ranks_.get(), "Put both into one layer, or give each its own.");
    }
  }
}

NamedTensors PipeTransformerImpl::parameters_of(size_t layer) const {
  NamedTensors found;
  std::unordered_set<const at::TensorImpl*> seen;
  for (const auto& item : layers_->children()[layer]->named_parameters())
    if (seen.insert(item.value().unsafeGetTensorImpl()).second)
      found.emplace_back(item.key(), item.value());
  return found;
}

NamedTensors PipeTransformerImpl::tensors_of(size_t layer) const {
  NamedTensors found = parameters_of(layer);
  std::unordered_set<const at::TensorImpl*> seen;
  for (const auto& item : layers_->children()[layer]->named_buffers())
    if (item.value().defined() && seen.insert(item.value().unsafeGetTensorImpl()).second)
      found.emplace_back(item.key(), item.value());
  return found;
}

int64_t PipeTransformerImpl::frozen() const {
  const int64_t entries = freezing_ ? freezing_->frozen() : 0;
  return entries == 0 ? 0 : frozen_ends_[static_cast<size_t>(entries - 1)];
}

// Measures layers where costs were not given, and goes to the first plan.
void PipeTransformerImpl::begin(const at::Tensor& input) {
  const int64_t rows = options_.global_batch / options_.chunks;
  LayerSeconds seconds;
  work_on_ranks(
      "layers to measure", "Mend the layer.",
      [&] { seconds = measure_layers(layers_, input.narrow(0, 0, rows)); }, ranks_.get());
  course_->take_costs(seconds.forward, seconds.backward);
  move_to(course_->next_plan(frozen()));
  epoch_begins_ = Clock::now();
}

at::Tensor PipeTransformerImpl::step(const at::Tensor& input, const at::Tensor& ids,
                                     const at::Tensor& target) {
  if (ranks_) ranks_->recover();
  const int64_t rows = rows_of(input);
  course_->check_batch(rows == options_.global_batch ? rows_of(target) : rows, ids);
  if (!course_->has_plan()) begin(input);
  if (!runner_) rebuild();  // what made one has thrown
  try {
    optimizer_->zero_grad();
    const at::Tensor loss = runner_->step(input, ids, target);
    if (freezing_ && freezing_->begin_step())
      freezing_->measure(frozen_layers_->gradients(freezing_->frozen()));
    trireme::step(*optimizer_);
    return course_->mean_loss(loss);
  } catch (const std::exception& error) {
    announce("a step: " + one_line(what_of(error)));
    throw;
  }
}

at::Tensor PipeTransformerImpl::eval_step(const at::Tensor& input, const at::Tensor& target) {
  if (ranks_) ranks_->recover();
  const int64_t rows = rows_of(input);
  course_->check_batch(rows == options_.global_batch ? rows_of(target) : rows,
                       options_.cache ? at::arange(rows, at::kLong) : at::Tensor());
  if (!course_->has_plan()) begin(input);
  if (!runner_) rebuild();
  try {
    return course_->mean_loss(runner_->evaluate(input, target));
  } catch (const std::exception& error) {
    announce("an evaluation: " + one_line(what_of(error)));
    throw;
  }
}

void PipeTransformerImpl::announce(const std::string& why) noexcept {
  if (ranks_) ranks_->announce_failure(why);
}

int64_t PipeTransformerImpl::hits() const {
  return options_.cache ? options_.cache->stats().hits : 0;
}

const ElasticEpoch& PipeTransformerImpl::end_epoch() {
  if (ranks_) ranks_->recover();
  const std::chrono::duration<double> seconds = Clock::now() - epoch_begins_;
  course_->end_epoch(frozen(), seconds.count(), hits() - hits_before_);
  if (freezing_) {
    const int64_t before = frozen();
    freezing_->advance(frozen_layers_->train_alone());
    if (frozen() != before) follow_freezing();
  }
  hits_before_ = hits();
  epoch_begins_ = Clock::now();
  return course_->history().back();
}

void PipeTransformerImpl::follow_freezing() {
  frozen_layers_->freeze(freezing_->frozen());
  train(is_training());
  const ElasticPlan next = course_->next_plan(frozen());
  if (next != course_->plan()) return move_to(next);
  const bool follows = next.ranks_per_pipeline > 1 && !options_.cache;  // requires_grad
  if (!follows) rebuild();
}

void PipeTransformerImpl::transform(const ElasticPlan& plan) {
  if (ranks_) ranks_->recover();
  move_to(plan);
}

void PipeTransformerImpl::move_to(const ElasticPlan& plan) {
  agree_on_ranks(
      {"plans of an elastic run", "ranks with other plans",
       "Call step(), end_epoch() and transform() alike on all ranks."},
      [&] {
        course_->check_plan(plan);
        const int64_t chunks = options_.chunks / plan.replicas;
        if (plan.ranks_per_pipeline > 1)
          schedule_of(PlanRunner::options_for(plan, options_.schedule, chunks),
                      plan.ranks_per_pipeline);
        return "the plan " + plan_text(plan);
      },
      ranks_.get());
  const auto moved = move_layers(moves_to(plan), plan_text(plan), ranks_.get());
  runner_.reset();
  course_->adopt(plan, frozen());
  const IndexRange own = course_->own_layers();
  for (size_t layer = 0; layer < layers_->size(); ++layer) {
    const auto number = static_cast<int64_t>(layer);
    if (moved[layer]) put_layer_state(*optimizer_, parameters_of(layer), *moved[layer]);
    if (number < own.begin || number >= own.end) release(layer);
  }
  rebuild();
}

// At the beginning rank 0 has all layers, and what the others have does not count.
std::vector<LayerMove> PipeTransformerImpl::moves_to(const ElasticPlan& plan) const {
  const std::vector<std::vector<int64_t>> at_first(layers_->size(), std::vector<int64_t>{0});
  const auto before = course_->has_plan() ? layer_holders(course_->plan()) : at_first;
  const auto after = layer_holders(plan);
  const std::vector<std::string> names = names_of(layers_);
  const int64_t rank = ranks_ ? ranks_->rank() : 0;
  std::vector<LayerMove> moves;
  for (size_t layer = 0; layer < names.size(); ++layer) {
    LayerMove move{names[layer], before[layer], after[layer], tensors_of(layer), {}, {}};
    if (holds(before[layer], rank)) {
      MovedState own = layer_state(*optimizer_, parameters_of(layer));
      move.state = std::move(own.state);
      move.values = std::move(own.values);
    }
    moves.push_back(std::move(move));
  }
  return moves;
}

void PipeTransformerImpl::release(size_t layer) const {
  const NamedTensors parameters = parameters_of(layer);
  forget_layer_state(*optimizer_, parameters);
  for (at::Tensor parameter : layers_->children()[layer]->parameters())
    parameter.mutable_grad().reset();
  const std::string text = error_text(
      "pipetransformer",
      "got an access to layer '" + names_of(layers_)[layer] + "', which this rank does not hold",
      ranks_->rank_of(), "Read it where it is held, or save a checkpoint.");
  for (const auto& [name, tensor] : tensors_of(layer)) free_memory(tensor, text);
}

void PipeTransformerImpl::rebuild() {
  runner_.reset();
  runner_ = std::make_unique<PlanRunner>(
      RunnerRequest{layers_, options_.schedule, loss_, options_.cache}, *course_, frozen());
}

const FreezeState& PipeTransformerImpl::freeze_state() const {
  if (!freezing_)
    refuse_elastic("got a run without freezing", ranks_.get(), "Pass options of freeze.");
  return freezing_->state();
}

void PipeTransformerImpl::load_freeze_state(const FreezeState& state) {
  freeze_state();  // refuses
  freezing_->load(state);
  if (course_->has_plan()) return follow_freezing();
  frozen_layers_->freeze(freezing_->frozen());
  train(is_training());
}

at::Tensor PipeTransformerImpl::frozen_numbers() const {
  if (!freezing_) return {};
  const FreezeState& state = freezing_->state();
  std::vector<int64_t> numbers{static_cast<int64_t>(state.layers.size()), state.frozen};
  numbers.insert(numbers.end(), state.history.begin(), state.history.end());
  return at::tensor(numbers, at::kLong);
}

void PipeTransformerImpl::load_frozen_numbers(const at::Tensor& numbers) {
  const auto* first = numbers.const_data_ptr<int64_t>();
  load_freeze_state({freeze_state().layers, first[1], {first + 2, first + numbers.numel()}});
}

void PipeTransformerImpl::train(bool on) {
  torch::nn::Module::train(on);
  layers_->train(on);
  if (freezing_ && options_.freeze->eval_frozen)
    frozen_layers_->set_training(0, freezing_->frozen(), false);
}

void PipeTransformerImpl::add_parts(HeldParts& parts) const {
  for (size_t layer = 0; layer < layers_->size(); ++layer) {
    for (const auto& [name, tensor] : tensors_of(layer)) {
      const std::vector<int64_t> first(static_cast<size_t>(tensor.dim()), 0);
      const at::Tensor values = has_memory(tensor) ? tensor : at::empty({0}, tensor.options());
      parts.try_emplace(tensor.unsafeGetTensorImpl(),
                        HeldPart{values, tensor.sizes().vec(), first});
    }
  }
}

}  // namespace trireme
