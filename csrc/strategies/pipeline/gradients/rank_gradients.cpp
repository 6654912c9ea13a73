#include <trireme/strategies/pipeline/gradients/rank_gradients.h>

#include <trireme/strategies/pipeline/refuse.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

namespace trireme {

using Tensors = std::vector<at::Tensor>;

RankGradients::RankGradients(const PipelineSchedule& schedule,
                             const std::vector<PipelineStageRequest>& stages,
                             Communicator& communicator, const PipelineEngineOptions& options)
    : micro_batches_(schedule.micro_batches),
      scale_grads_(options.scale_grads),
      leads_strategies_(!options.on_threads),
      tied_(schedule, options.tied, communicator),
      replicas_(options.replicas, options.compression),
      unlisted_(options.unlisted ? options.unlisted : std::make_shared<UnlistedGradients>()),
      ends_unlisted_(!options.unlisted) {
  for (const PipelineStageRequest& request : stages) {
    stages_.push_back({request.stage, request.parameters.tensors, request.parameters.names});
    strategies_.emplace_back(request.strategies);
    tied_.set_parameters(request.stage, request.parameters);
  }
  list_for_unlisted();
  name_parameters();
  find_strategies();
  spread_values(stages);
  for (StageStrategies& strategies : strategies_) strategies.end_step();
  tied_.spread_values();
}

void RankGradients::list_for_unlisted() {
  if (!ends_unlisted_) return;
  Tensors listed;
  for (const StageParameters& stage : stages_)
    listed.insert(listed.end(), stage.all.begin(), stage.all.end());
  unlisted_->set_listed(listed);
}

// Tells replicas the parameters of all stages, each once.
void RankGradients::name_parameters() {
  NamedParameters named;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const StageParameters& stage : stages_) {
    for (size_t i = 0; i < stage.all.size(); ++i) {
      if (!seen.insert(stage.all[i].unsafeGetTensorImpl()).second) continue;
      named.names.push_back(stage.names[i]);
      named.tensors.push_back(stage.all[i]);
    }
  }
  named.sparse_gradient.assign(named.tensors.size(), false);
  replicas_.set_parameters(named);
}

void RankGradients::spread_values(const std::vector<PipelineStageRequest>& stages) {
  for (const PipelineStageRequest& request : stages)
    for (const auto& [name, buffer] : request.buffers) buffers_.push_back(buffer);
  Tensors values = buffers_;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const StageParameters& stage : stages_) {
    for (const at::Tensor& parameter : stage.own)
      if (seen.insert(parameter.unsafeGetTensorImpl()).second) values.push_back(parameter);
  }
  if (!values.empty()) replicas_.spread(values);
}

void RankGradients::set_parameters(size_t place, NamedParameters parameters,
                                   std::vector<std::shared_ptr<DeferredSync>> strategies) {
  StageParameters& stage = stages_[place];
  const std::string missing = tied_.set_parameters(stage.stage, parameters);
  if (!missing.empty()) refuse_pipeline("got " + missing, "Make the pipeline anew.");
  stage.all = std::move(parameters.tensors);
  stage.names = std::move(parameters.names);
  strategies_[place] = StageStrategies(std::move(strategies));
  list_for_unlisted();
  name_parameters();
}

void RankGradients::recover() {
  if (replicas_.exist()) replicas_.communicator().recover();
}

bool RankGradients::has_strategies() const {
  for (size_t place = 0; place < stages_.size(); ++place) {
    if (strategies_[place].has_given()) return true;
    for (const at::Tensor& parameter : stages_[place].all)
      if (deferred_sync_of(parameter)) return true;
  }
  return false;
}

bool RankGradients::find_strategies() {
  bool exist = false;
  for (size_t place = 0; place < stages_.size(); ++place) {
    if (!leads_strategies_) {
      stages_[place].own = stages_[place].all;
      continue;
    }
    stages_[place].own = strategies_[place].begin_step(stages_[place].all);
    exist = exist || strategies_[place].exist();
  }
  return exist;
}

void RankGradients::begin_step(const Step& step) {
  step_ = step;
  step_.divides = step.divides && scale_grads_;
  if (std::exchange(buffers_may_differ_, step.synchronizes) && !buffers_.empty())
    replicas_.spread(buffers_);
  replicas_.begin_step(step.step, step.synchronizes);
  Tensors all;
  for (const StageParameters& stage : stages_)
    all.insert(all.end(), stage.own.begin(), stage.own.end());
  gradients_.begin(all);
  if (replicas_.exist() && step.synchronizes) list_complete();
}

void RankGradients::list_complete() {
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const Tensors& copies : {tied_.first_copies(), tied_.later_copies()})
    for (const at::Tensor& copy : copies) seen.insert(copy.unsafeGetTensorImpl());
  for (auto place = order_.rbegin(); place != order_.rend(); ++place) {
    StageParameters& stage = stages_[*place];
    stage.complete.clear();
    for (const at::Tensor& parameter : stage.own)
      if (seen.insert(parameter.unsafeGetTensorImpl()).second) stage.complete.push_back(parameter);
  }
}

void RankGradients::average(const Tensors& parameters, const std::string& label) {
  gradients_.add_earlier(parameters, divisor());
  replicas_.average(parameters, label);
}

void RankGradients::after_last_backward(size_t place) {
  strategies_[place].after_last_backward();
  const StageParameters& stage = stages_[place];
  if (replicas_.exist()) average(stage.complete, c10::str("stage ", stage.stage));
}

void RankGradients::finish_sums() {
  tied_.add_up(step_.step);
  const bool averages = replicas_.exist() && step_.synchronizes;
  if (averages) {
    average(tied_.first_copies(), "tied parameters");
    replicas_.finish();
  }
  tied_.send_sums(step_.step);
  if (averages) gradients_.set_whole(tied_.later_copies());
}

void RankGradients::end_step() {
  replicas_.end_step();
  gradients_.end(divisor());
  if (ends_unlisted_) unlisted_->end(divisor());
  for (StageStrategies& strategies : strategies_) strategies.end_step();
}

void RankGradients::abandon(const std::string& why) noexcept {
  replicas_.abandon(why);
  for (StageStrategies& strategies : strategies_) strategies.abandon(why);
  gradients_.abandon();
  if (ends_unlisted_) unlisted_->abandon();
}

}  // namespace trireme
