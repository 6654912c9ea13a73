#include <trireme/grad/backward_scope.h>

#include <trireme/common/error.h>
#include <trireme/common/trace.h>
#include <trireme/module/output_hook.h>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <set>
#include <utility>

// See [Note: when a backward synchronizes] in grad_reducer.h.

namespace trireme {

void GradReducer::after_forward(const std::vector<at::Tensor>& outputs, bool synchronize,
                                bool all_found) {
  bool is_hooked = false;
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad()) continue;
    if (output.is_leaf()) {
      // Handed through; its hooks would pile up from forward to forward. An input is nobody's
      // business, a parameter of ours has a hook already.
      all_found =
          all_found && std::none_of(parameters_.begin(), parameters_.end(),
                                    [&](const at::Tensor& own) { return own.is_same(output); });
      continue;
    }
    is_hooked = true;
    on_output_gradient(output, [reducer = weak_from_this(), synchronize] {
      if (const auto alive = reducer.lock()) alive->output_gradient_arrived(synchronize);
    });
  }
  const std::lock_guard lock(mutex_);
  if (synchronize && !(is_hooked && all_found)) arm_at_parameter_ = true;
  if (phase_ == Phase::kIdle) look_at_module();
  clock_.forward_ends();
}

void GradReducer::prepare_for_backward() {
  const std::lock_guard lock(mutex_);
  force_synchronize_ = true;
}

void GradReducer::output_gradient_arrived(bool synchronize) {
  const std::lock_guard lock(mutex_);
  if ((synchronize && synchronize_) || force_synchronize_) arm();
}

void GradReducer::arm() {
  if (phase_ == Phase::kRunning) return;
  const auto* visited = torch::autograd::get_current_graph_task_exec_info();
  if (visited != nullptr && !visited->empty() &&
      std::none_of(hooks_.begin(), hooks_.end(),
                   [&](const GradHook& hook) { return hook.is_visited_by(*visited); }) &&
      std::none_of(newcomers_.begin(), newcomers_.end(), [&](const Newcomer& newcomer) {
        return newcomer.hook.is_visited_by(*visited);
      })) {
    return;
  }
  if (armed_) armed_();
  if (options_.arms_at_parameters) look_around();
  begin_backward(/*shadow=*/false);
  const auto scope = std::make_shared<BackwardScope>(shared_from_this());
  torch::autograd::Engine::get_default_engine().queue_callback([scope] { scope->finish(); });
}

void GradReducer::finish_backward() {
  TRIREME_TRACE("grad_reducer.finish_backward");
  launch_rest();
  if (manual_finalization_) {
    phase_ = Phase::kAwaitingFinalize;
    return;
  }
  collect();
}

void GradReducer::announce_failure(const std::string& text) noexcept {
  std::set<Communicator*> told{nullptr};
  for (Communicator* one :
       {communicator_.get(), options_.scatters_with.get(), options_.replicates_with.get()}) {
    if (told.insert(one).second && one->world() > 1 && !one->failure()) one->announce_failure(text);
  }
}

void GradReducer::abandon_backward() noexcept {
  const RankOf where = communicator_->rank_of();
  try {
    const std::string cause =
        own_error_.empty() ? "An exception left it; see the traceback of that rank" : own_error_;
    const std::string progress = last_arrived_ < 0
                                     ? "before any gradient arrived"
                                     : "after the gradient of '" + name_of(last_arrived_) + "'";
    const std::string text = error_text(
        options_.area, "backward " + std::to_string(step_) + " was abandoned " + progress, where,
        cause);
    announce_failure(text);
  } catch (
      ...) {  // out of memory while dying of something else: the peers see their deadline instead
  }
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < fires_seen_.size(); ++i)
    fires_expected_[i] = std::max(fires_expected_[i], fires_seen_[i]);
  drop_pending();
  phase_ = Phase::kIdle;
  defers_ = false;
  put_back();
}

}  // namespace trireme
