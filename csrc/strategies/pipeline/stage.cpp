#include <trireme/strategies/pipeline/stage.h>

#include <trireme/activation/forward_state.h>
#include <trireme/common/error.h>
#include <trireme/strategies/pipeline/received_node.h>
#include <trireme/strategies/pipeline/threads/leaf_edges.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <optional>
#include <utility>

namespace trireme {

int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined()) bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return bytes;
}

Stage::Stage(PipelineStageRequest request, const PipelineSchedule& schedule, StageSkips skips)
    : index_(request.stage),
      stages_(schedule.stages),
      name_(std::move(request.name)),
      function_(std::move(request.function)),
      leaves_(std::move(request.leaves)),
      skips_(std::move(skips)),
      live_(static_cast<size_t>(schedule.micro_batches)) {}

std::string Stage::text() const {
  const std::string number = "stage " + std::to_string(index_);
  return name_.empty() ? number : number + " (" + name_ + ")";
}

void Stage::begin_step(const Step& step) {
  step_ = step;
  report_ = {};
  report_.stage = index_;
  waits_ = {};
}

// Keeps no inputs: the frame has them.
class Stage::Again final : public CheckpointedCall {
 public:
  Again(Stage& stage, int64_t micro_batch, std::string text, const std::vector<at::Tensor>& inputs)
      : stage_(stage),
        micro_batch_(micro_batch),
        text_(std::move(text)),
        state_(ForwardState::capture(/*with_random=*/true, inputs)) {}

  void run(const std::vector<at::Tensor>& inputs) override {
    const ForwardStateGuard guard(state_);
    try {
      stage_.call_again(micro_batch_, {inputs, text_});
    } catch (...) {
      if (!SavedTensorHooks::get().is_stop(std::current_exception())) throw;
    }
  }
  std::string name() const override { return stage_.text(); }

 private:
  Stage& stage_;
  int64_t micro_batch_;
  std::string text_;
  ForwardState state_;
};

void Stage::count_bytes(Live& live, int64_t bytes) {
  live.bytes += bytes;
  live_bytes_ += bytes;
  report_.peak_live_bytes = std::max(report_.peak_live_bytes, live_bytes_);
}

void Stage::count_live(Live& live) {
  live.is_live = true;
  report_.peak_live = std::max(report_.peak_live, ++live_count_);
  count_bytes(live, std::exchange(live.returned, 0));
}

PipelineValue Stage::forward(int64_t micro_batch, StageInput input, bool is_recomputed) {
  Live& live = at(micro_batch);
  std::vector<at::Tensor>& tensors = input.value.tensors;
  const auto given = static_cast<std::ptrdiff_t>(tensors.size() - popped());
  if (step_.trains) {
    live = {};
    if (!is_first()) live.received = ReceivedNode::put_behind(tensors, input.needs_gradient);
    count_bytes(live, bytes_of(tensors));
    if (is_recomputed) {
      for (const at::Tensor& tensor : tensors) {
        if (!tensor.defined() || tensor.is_inference()) continue;
        const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
        live.versions.emplace_back(counter, counter.current_version());
      }
      live.frame = c10::make_intrusive<CheckpointFrame>(
          std::make_unique<Again>(*this, micro_batch, input.value.text, tensors), tensors,
          CheckpointFrame::Options{});
    }
  }
  skips_.begin(
      {std::make_move_iterator(tensors.begin() + given), std::make_move_iterator(tensors.end())});
  tensors.resize(static_cast<size_t>(given));
  PipelineValue output;
  {
    const SkipScope scope(&skips_);
    std::optional<LossScope> losses;
    if (!step_.is_pass || step_.takes_losses) losses.emplace(live.losses);
    std::optional<CheckpointForward> keeps_nothing;
    if (live.frame) keeps_nothing.emplace(live.frame);
    output = function_->forward(micro_batch, std::move(input.value));
  }
  skips_.check_done();
  parts_.clear();
  for (const StageLoss& part : live.losses) {
    at::Tensor value = part.value.detach();
    if (part.value.requires_grad()) value.set_requires_grad(true);
    parts_.push_back({std::move(value), part.weight});
  }
  if (!step_.trains) {
    live.losses.clear();
    return output;
  }
  const auto keep = [&](const at::Tensor& tensor) {
    const bool needs = tensor.defined() && tensor.requires_grad();
    live.outputs.push_back(needs ? torch::autograd::impl::gradient_edge(tensor)
                                 : torch::autograd::Edge());
    if (tensor.defined()) live.returned += static_cast<int64_t>(tensor.nbytes());
    return needs;
  };
  for (const SkipSlot& stashed : skips_.outgoing) keep(stashed.tensor);
  for (const at::Tensor& tensor : output.tensors)
    live.wants_gradients |= keep(tensor) && (!is_last() || step_.is_pass);
  if (!live.frame) count_live(live);
  return output;
}

std::vector<StageLoss> Stage::take_parts_of_loss() { return std::exchange(parts_, {}); }

void Stage::take_loss_gradients(int64_t micro_batch, std::vector<at::Tensor> gradients) {
  TORCH_INTERNAL_ASSERT(gradients.size() == at(micro_batch).losses.size());
  at(micro_batch).loss_gradients = std::move(gradients);
}

at::Tensor Stage::loss(int64_t micro_batch, const PipelineValue& output) {
  Live& live = at(micro_batch);
  live.has_loss = true;
  std::optional<CheckpointForward> keeps_nothing;
  if (live.frame) keeps_nothing.emplace(live.frame);
  at::Tensor loss = function_->loss(micro_batch, output);
  TORCH_CHECK_VALUE(loss.defined() && loss.numel() == 1 && !loss.is_complex(),
                    "expected a loss of one real number");
  if (step_.trains) live.losses.push_back({loss});
  return loss;
}

void Stage::recompute(int64_t micro_batch) {
  Live& live = at(micro_batch);
  count_live(live);
  for (const auto& [counter, version] : live.versions) {
    TORCH_CHECK(counter.current_version() == version,
                error_text("pipeline",
                           "got an input of " + text() +
                               " that was changed in place before it is recomputed",
                           {}, "Let layers change copies, or do not checkpoint."));
  }
  live.frame->recompute_ahead();
}

void Stage::call_again(int64_t micro_batch, PipelineValue input) {
  std::vector<at::Tensor>& tensors = input.tensors;
  const auto given = static_cast<std::ptrdiff_t>(tensors.size() - popped());
  StageSkips skips = skips_;
  skips.begin(
      {std::make_move_iterator(tensors.begin() + given), std::make_move_iterator(tensors.end())});
  tensors.resize(static_cast<size_t>(given));
  const SkipScope scope(&skips);
  const PipelineValue output = function_->forward(micro_batch, std::move(input));
  if (at(micro_batch).has_loss) function_->loss(micro_batch, output);
}

Stage::Roots Stage::roots_of(const Live& live, const std::vector<at::Tensor>& gradients) const {
  Roots roots;
  for (size_t i = 0; i < live.losses.size(); ++i) {
    const auto& [value, weight] = live.losses[i];
    if (!value.requires_grad()) continue;
    at::Tensor gradient;
    if (!step_.is_pass) {
      gradient = at::full_like(value, weight * step_.loss_gradient);
    } else if (!live.loss_gradients.empty()) {
      gradient = live.loss_gradients[i];
    }
    if (!gradient.defined()) continue;
    roots.edges.push_back(torch::autograd::impl::gradient_edge(value));
    roots.gradients.push_back(std::move(gradient));
  }
  const size_t expected = live.wants_gradients ? live.outputs.size() : skips_.outgoing.size();
  TORCH_CHECK(gradients.size() == expected, "got gradients of ", gradients.size(),
              " tensors, expected those of ", expected);
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined() || !live.outputs[i].is_valid()) continue;
    roots.edges.push_back(live.outputs[i]);
    roots.gradients.push_back(gradients[i]);
  }
  if (leaves_) leaves_->redirect(roots.edges);
  return roots;
}

torch::autograd::edge_list Stage::graph_of(int64_t micro_batch) const {
  const Live& live = at(micro_batch);
  torch::autograd::edge_list edges = live.outputs;
  for (const StageLoss& loss : live.losses) {
    if (loss.value.requires_grad())
      edges.push_back(torch::autograd::impl::gradient_edge(loss.value));
  }
  return edges;
}

void Stage::end(const Live& live) {
  if (live.is_live) --live_count_;
  live_bytes_ -= live.bytes;
}

std::vector<at::Tensor> Stage::backward(int64_t micro_batch,
                                        const std::vector<at::Tensor>& gradients, bool keep_graph) {
  if (keep_graph) {
    Live& live = at(micro_batch);
    return run_backward(live, roots_of(live, gradients), keep_graph);
  }
  Live live = std::exchange(at(micro_batch), Live());
  const Roots roots = roots_of(live, gradients);
  live.outputs.clear();
  live.losses.clear();
  std::vector<at::Tensor> found = run_backward(live, roots, keep_graph);
  if (function_->defers_weights()) {
    function_->begin_weights(micro_batch);
    function_->finish_weights(micro_batch);
  }
  end(live);
  return found;
}

std::vector<at::Tensor> Stage::run_backward(const Live& live, const Roots& roots,
                                            bool keep_graph) const {
  const SkipScope refuses(nullptr);
  if (!roots.edges.empty()) {
    torch::autograd::Engine::get_default_engine().execute(
        roots.edges, roots.gradients, keep_graph, /*create_graph=*/false, /*accumulate_grad=*/true);
  }
  if (!live.received) return {};
  return static_cast<ReceivedNode&>(*live.received).take_gradients();
}

std::vector<at::Tensor> Stage::backward_input(int64_t micro_batch,
                                              const std::vector<at::Tensor>& gradients) {
  Live& live = at(micro_batch);
  Roots roots = roots_of(live, gradients);
  live.outputs.clear();
  live.losses.clear();
  if (function_->defers_weights()) {
    std::vector<at::Tensor> found = run_backward(live, roots, /*keep_graph=*/false);
    function_->begin_weights(micro_batch);
    return found;
  }
  live.split = std::make_unique<SplitBackward>(std::move(roots.edges), std::move(roots.gradients),
                                               live.received);
  const SkipScope refuses(nullptr);
  return live.split->input_half();
}

void Stage::backward_weight(int64_t micro_batch) {
  Live live = std::exchange(at(micro_batch), Live());
  const SkipScope refuses(nullptr);
  if (function_->defers_weights()) {
    function_->finish_weights(micro_batch);
  } else {
    live.split->weight_half();
  }
  end(live);
}

StageReport Stage::finished_report() const {
  StageReport report = report_;
  const std::string before = "stage " + std::to_string(index_ - 1);
  const std::string next = "stage " + std::to_string(index_ + 1);
  if (!is_first()) {
    report.waiting_ms["from " + before] = waits_.from_before;
    report.waiting_ms["to " + before] = waits_.to_before;
  }
  if (!is_last()) {
    report.waiting_ms["from " + next] = waits_.from_next;
    report.waiting_ms["to " + next] = waits_.to_next;
  }
  if (has_skips()) report.waiting_ms["skips"] = waits_.skips;
  return report;
}

std::vector<Stage::Live> Stage::take_live() {
  live_count_ = live_bytes_ = 0;
  return std::exchange(live_, std::vector<Live>(live_.size()));
}

void Stage::put_live(std::vector<Live> live) {
  live_ = std::move(live);
  for (const Live& kept : live_) {
    live_count_ += kept.is_live ? 1 : 0;
    live_bytes_ += kept.bytes;
  }
}

void Stage::abandon() {
  for (Live& live : live_) live = {};
  skips_.begin(std::vector<at::Tensor>(popped()));
  live_count_ = live_bytes_ = 0;
}

}  // namespace trireme
