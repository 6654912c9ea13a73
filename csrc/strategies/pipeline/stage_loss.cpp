#include <trireme/strategies/pipeline/stage_loss.h>

#include <trireme/activation/checkpoint_frame.h>
#include <trireme/strategies/pipeline/refuse.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

namespace trireme {
namespace {

thread_local std::vector<StageLoss>* receiver = nullptr;

}  // namespace

void pipeline_loss(const at::Tensor& value, double weight) {
  if (!value.defined() || value.numel() != 1 || value.is_complex())
    refuse_pipeline("got a part of the loss that is no real number", "Pass its mean or its sum.");
  if (repeats_forward()) return;
  if (receiver != nullptr) {
    receiver->push_back({value, weight});
  } else if (at::GradMode::is_enabled()) {
    refuse_pipeline("got a part of the loss outside of a pipeline's step",
                    "Collect it (Python: trireme.collect_losses(); C++: LossScope).");
  }
}

bool repeats_forward() {
  return is_recomputing() || torch::autograd::get_current_graph_task_id() != -1;
}

std::vector<StageLoss>* LossScope::current() { return receiver; }

LossScope::LossScope(std::vector<StageLoss>& losses) : before_(std::exchange(receiver, &losses)) {}

LossScope::~LossScope() { receiver = before_; }

}  // namespace trireme
