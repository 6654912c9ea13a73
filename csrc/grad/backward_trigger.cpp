#include <trireme/grad/backward_trigger.h>

#include <trireme/module/abandoned_nodes.h>
#include <trireme/module/backward_error.h>
#include <trireme/module/output_hook.h>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

// See [Note: when a backward synchronizes] in backward_trigger.h.

namespace trireme {

// Lives in the end callback of one armed backward. Autograd destroys the callback without calling
// it when an exception leaves that backward; this is how the steps, and through them the other
// ranks, learn of it.
class BackwardTrigger::Scope {
 public:
  explicit Scope(std::shared_ptr<BackwardSteps> steps) : steps_(std::move(steps)) {}
  ~Scope() {
    if (finished_) return;
    steps_->abandon_backward(error_.text());
    free_abandoned_nodes();
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

  void finish() {
    steps_->finish_backward();
    finished_ = true;
  }

 private:
  std::shared_ptr<BackwardSteps> steps_;
  BackwardError error_;
  bool finished_ = false;
};

// Lives in a callback of a backward whose steps have not begun, and may refuse to.
struct BackwardTrigger::Beginning {
  ~Beginning() {
    if (!is_over) free_abandoned_nodes();
  }
  bool is_over = false;
};

void BackwardTrigger::before_forward() {
  const auto lock = this->lock();
  if (const auto steps = steps_.lock()) steps->forward_begins();
}

void BackwardTrigger::after_forward(const std::vector<at::Tensor>& outputs, bool synchronize,
                                    bool all_found) {
  const auto steps = steps_.lock();
  if (!steps) return;
  bool is_hooked = false;
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad()) continue;
    if (output.is_leaf()) {
      // Handed through; its hooks would pile up from forward to forward. An input needs none, and a
      // parameter of ours has a hook already.
      all_found = all_found && !steps->owns(output);
      continue;
    }
    is_hooked = true;
    on_output_gradient(output, [self = weak_from_this(), synchronize] {
      if (const auto alive = self.lock()) alive->output_gradient_arrived(synchronize);
    });
  }
  const auto lock = this->lock();
  wants_ = synchronize;
  if (synchronize && !(is_hooked && all_found)) arms_at_any_ = true;
  steps->forward_ends();
}

void BackwardTrigger::prepare_for_backward() {
  const auto lock = this->lock();
  forced_ = !held_ || (wants_ && synchronize_);
}

void BackwardTrigger::hold(bool held) {
  const auto lock = this->lock();
  held_ = held;
  forced_ = false;
  wants_ = true;
}

bool BackwardTrigger::is_held() const {
  const auto lock = this->lock();
  return held_;
}

void BackwardTrigger::synchronize_unreached() {
  // Ranks whose backward reached any of them go through all of them in this order.
  for (const std::weak_ptr<BackwardTrigger>& sibling : siblings_)
    if (const auto alive = sibling.lock()) alive->synchronize_if_unreached();
  synchronize_if_unreached();  // if it is not among them
}

void BackwardTrigger::synchronize_if_unreached() {
  const auto lock = this->lock();
  if (!std::exchange(forced_, false) || !is_idle()) return;
  const auto steps = steps_.lock();
  if (!steps) return;
  if (armed_) armed_();
  steps->reduce_accumulated();
}

void BackwardTrigger::announce_failure(const std::string& text) noexcept {
  if (const auto steps = steps_.lock()) steps->announce_failure(text);
}

void BackwardTrigger::set_synchronize(bool synchronize) {
  const auto lock = this->lock();
  synchronize_ = synchronize;
}

void BackwardTrigger::ask_to_synchronize(std::function<bool()> asked) {
  const auto lock = this->lock();
  asked_ = std::move(asked);
}

void BackwardTrigger::set_armed_callback(std::function<void()> callback) {
  const auto lock = this->lock();
  armed_ = std::move(callback);
}

void BackwardTrigger::arm_together(const std::vector<std::shared_ptr<BackwardTrigger>>& siblings) {
  for (const std::shared_ptr<BackwardTrigger>& sibling : siblings) {
    const auto lock = sibling->lock();
    sibling->siblings_.assign(siblings.begin(), siblings.end());
  }
}

bool BackwardTrigger::leads_siblings() const {
  return siblings_.empty() || siblings_.front().lock().get() == this;
}

void BackwardTrigger::output_gradient_arrived(bool synchronize) {
  const auto lock = this->lock();
  if ((synchronize && synchronizes()) || forced_) arm();
}

void BackwardTrigger::gradient_due() {
  if (!at_parameters_) return;
  const auto arm_one = [](BackwardTrigger& sibling) {
    const auto lock = sibling.lock();
    if (sibling.is_idle() && (sibling.forced_ || sibling.synchronizes())) sibling.arm();
  };
  {
    const auto lock = this->lock();
    if (!is_idle() || !(forced_ || synchronizes())) return;
  }
  for (const std::weak_ptr<BackwardTrigger>& sibling : siblings_)
    if (const auto alive = sibling.lock()) arm_one(*alive);
  arm_one(*this);  // if it is not among them
}

bool BackwardTrigger::gradient_came() {
  if (phase_ != Phase::kRunning && (forced_ || (arms_at_any_ && synchronizes()))) arm();
  return phase_ == Phase::kRunning;
}

void BackwardTrigger::arm() {
  if (phase_ == Phase::kRunning) return;
  const auto steps = steps_.lock();
  if (!steps) return;
  const auto* visited = torch::autograd::get_current_graph_task_exec_info();
  if (visited != nullptr && !visited->empty() && !steps->is_visited_by(*visited)) return;
  auto& engine = torch::autograd::Engine::get_default_engine();
  const auto beginning = std::make_shared<Beginning>();
  engine.queue_callback([beginning] { beginning->is_over = true; });
  if (armed_) armed_();
  if (at_parameters_) steps->look_around();
  begin(*steps, Part::kGradients);
  beginning->is_over = true;
  const auto scope = std::make_shared<Scope>(steps);
  engine.queue_callback([scope] { scope->finish(); });
}

void BackwardTrigger::begin(BackwardSteps& steps, Part part) {
  steps.begin_backward(part);
  forced_ = arms_at_any_ = false;
  phase_ = Phase::kRunning;
}

void BackwardTrigger::begin_by_itself(Part part) {
  const auto lock = this->lock();
  if (const auto steps = steps_.lock()) begin(*steps, part);
}

}  // namespace trireme
