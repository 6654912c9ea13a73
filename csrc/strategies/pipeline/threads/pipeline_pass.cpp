#include <trireme/strategies/pipeline/threads/pipeline_pass.h>

#include <trireme/common/error.h>
#include <trireme/module/autograd_node.h>
#include <trireme/strategies/pipeline/stage_loss.h>

#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>

#include <array>
#include <cstdint>
#include <pthread.h>
#include <string>
#include <string_view>
#include <utility>

namespace trireme {

using torch::autograd::variable_list;
using Tensors = std::vector<at::Tensor>;

namespace {

// Throws in a thread that torch's engine has for a device: the pipeline's threads would wait for
// it.
void refuse_device_thread() {
  std::array<char, 16> name{};
  pthread_getname_np(pthread_self(), name.data(), name.size());
  TORCH_CHECK_NOT_IMPLEMENTED(
      !std::string_view(name.data()).starts_with("pt_autograd"),
      error_text("pipeline",
                 "got a backward of a pipeline on devices from within another backward, as of a "
                 "reentrant checkpoint",
                 {}, "Use checkpoints that are not reentrant."));
}

}  // namespace

class PassNode final : public torch::autograd::Node {
 public:
  explicit PassNode(std::shared_ptr<PipelinePass> pass) : pass_(std::move(pass)) {}

  variable_list apply(variable_list&& gradients) override {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !at::GradMode::is_enabled(),
        error_text("pipeline",
                   "got a backward with create_graph=True, expected one without: the graphs of "
                   "stages are not part of the caller's",
                   {}, "Differentiate twice without the pipeline."));
    if (pass_->threads_->is_on_devices()) {
      refuse_device_thread();
      gradients = std::exchange(pass_->handed_over_, {});
    }
    return pass_->backward(std::move(gradients),
                           torch::autograd::get_current_graph_task_keep_graph());
  }
  void release_variables() override { pass_->release(); }
  std::string name() const override { return "TriremePipeline"; }

 private:
  std::shared_ptr<PipelinePass> pass_;
};

class HandOverNode final : public torch::autograd::Node {
 public:
  explicit HandOverNode(std::shared_ptr<PipelinePass> pass) : pass_(std::move(pass)) {}

  variable_list apply(variable_list&& gradients) override {
    pass_->handed_over_ = std::move(gradients);
    pass_->wait_for_gradients();
    return {at::zeros({})};
  }
  std::string name() const override { return "TriremePipelineOutputs"; }

 private:
  std::shared_ptr<PipelinePass> pass_;
};

namespace {

class EnteredNode final : public torch::autograd::Node {
 public:
  variable_list apply(variable_list&& gradients) override { return std::move(gradients); }
  std::string name() const override { return "TriremePipelineInput"; }
};

}  // namespace

PipelinePass::PipelinePass(std::shared_ptr<PipelineThreads> threads,
                           std::shared_ptr<BatchVersions> versions)
    : threads_(std::move(threads)),
      versions_(std::move(versions)),
      records_(at::GradMode::is_enabled()) {}

at::Tensor PipelinePass::enter(const at::Tensor& input, int64_t micro_batch) {
  if (!records_ || !input.requires_grad()) return input;
  at::Tensor leaf = versions_->apart(input, micro_batch).detach().set_requires_grad(true);
  const auto node = make_node<EnteredNode>();
  node->set_next_edges({torch::autograd::impl::gradient_edge(leaf)});
  at::Tensor entered = leaf.detach();
  torch::autograd::set_history(entered, node);
  inputs_.emplace_back(input, std::move(leaf));
  return entered;
}

std::vector<PipelineValue> PipelinePass::forward(std::vector<PipelineValue> inputs,
                                                 std::function<void(bool)> around_backward) {
  around_backward_ = std::move(around_backward);
  // A forward that a checkpoint repeats has added its parts of the loss before.
  const bool repeats = repeats_forward();
  std::vector<StageLoss>* receiver = repeats ? nullptr : LossScope::current();
  PassOutputs found =
      threads_->forward_pass(std::move(inputs), state_, {records_, repeats || receiver != nullptr});
  versions_->tell_batch();
  const auto hand_losses_out = [&] {
    if (receiver == nullptr) return;
    for (PassLoss& loss : found.losses) receiver->push_back(std::move(loss.part));
  };
  if (!records_) {
    hand_losses_out();
    return std::move(found.outputs);
  }
  torch::autograd::edge_list edges;
  for (const auto& [input, leaf] : inputs_)
    edges.push_back(torch::autograd::impl::gradient_edge(input));
  for (const PipelineThreads::PassParameter& parameter : state_.parameters)
    edges.push_back(torch::autograd::impl::gradient_edge(parameter.parameter));
  const auto node = make_node<PassNode>(shared_from_this());
  node->set_next_edges(std::move(edges));
  auto front = node;
  if (threads_->is_on_devices()) {
    const uint32_t place = node->add_input_metadata(at::zeros({}));
    front = make_node<HandOverNode>(shared_from_this());
    front->set_next_edges({{node, place}});
  }
  const auto put_before = [&front](at::Tensor& tensor) -> int64_t {
    if (!tensor.defined() || !tensor.requires_grad()) return -1;
    const auto place = static_cast<int64_t>(front->num_inputs());
    tensor = tensor.detach();
    torch::autograd::set_history(tensor, front);
    return place;
  };
  for (PipelineValue& output : found.outputs) {
    std::vector<int64_t>& places = places_.emplace_back();
    for (at::Tensor& tensor : output.tensors) places.push_back(put_before(tensor));
  }
  for (PassLoss& loss : found.losses)
    loss_places_[{loss.stage, loss.micro_batch}].push_back(put_before(loss.part.value));
  hand_losses_out();
  return std::move(found.outputs);
}

// On devices the gradients are on a stream of one device, and parts of the loss may belong to other
// devices: their streams wait for it.
void PipelinePass::wait_for_gradients() {
  if (loss_places_.empty()) return;
  for (const at::Tensor& gradient : handed_over_) {
    if (!gradient.defined() || gradient.device().is_cpu()) continue;
    const c10::impl::VirtualGuardImpl devices(gradient.device().type());
    const c10::Stream current = devices.getStream(devices.getDevice());
    for (const c10::Stream& stream : state_.streams) {
      if (stream == current || stream.device().is_cpu()) continue;
      c10::Event event(stream.device_type());
      event.record(current);
      event.block(stream);
    }
    return;
  }
}

Tensors PipelinePass::backward(Tensors gradients, bool keep_graph) {
  TORCH_CHECK(!is_released_,
              "Trying to backward through the graph of a pipeline a second time, after what it had "
              "saved was freed. Pass retain_graph=True to the first backward.");
  PassBackward pass{.keep_graph = keep_graph};
  const auto gradients_at = [&gradients](const std::vector<int64_t>& places) {
    Tensors taken;
    for (const int64_t place : places)
      taken.push_back(place < 0 ? at::Tensor() : gradients[static_cast<size_t>(place)]);
    return taken;
  };
  for (const std::vector<int64_t>& places : places_) pass.gradients.push_back(gradients_at(places));
  for (const auto& [of, places] : loss_places_) pass.of_losses[of] = gradients_at(places);
  run_backward(pass);
  if (!keep_graph) is_released_ = true;
  Tensors found;
  for (auto& [input, leaf] : inputs_)
    found.push_back(std::exchange(leaf.mutable_grad(), at::Tensor()));
  for (PipelineThreads::PassParameter& parameter : state_.parameters)
    found.push_back(parameter.take_gradient());
  return found;
}

void PipelinePass::run_backward(const PassBackward& backward) {
  const auto around = around_backward_;  // release() may come meanwhile
  const auto versions = versions_;
  if (around) around(true);
  versions->tell_micro_batches();
  try {
    threads_->backward_pass(state_, backward);
  } catch (...) {
    if (around) around(false);
    throw;
  }
  versions->tell_batch();
  if (around) around(false);
}

void PipelinePass::release() {
  is_released_ = true;
  state_.kept.clear();
  around_backward_ = {};
  versions_.reset();  // they hold the batch
}

}  // namespace trireme
