#include <trireme/strategies/pipeline/stage_edge.h>

#include <algorithm>
#include <utility>

namespace trireme {
namespace {

using Tensors = std::vector<at::Tensor>;

bool any(const std::vector<bool>& flags) {
  return std::find(flags.begin(), flags.end(), true) != flags.end();
}

// Sends, and counts the message.
void send(TensorSender& sender, const EdgeMessage& message, PipelineValue value) {
  StageReport& report = message.stage.report();
  ++report.messages;
  report.bytes += bytes_of(value.tensors);
  sender.send({message.step, message.micro_batch, std::move(value.text), std::move(value.tensors)},
              message.label);
}

}  // namespace

StageEdge::StageEdge(PipelineEdge stages, bool is_local, int64_t micro_batches)
    : stages_(stages),
      is_local_(is_local),
      due_(static_cast<size_t>(micro_batches)),
      inputs_(due_.size()),
      gradients_(due_.size()) {}

void StageEdge::connect(bool is_onward, TensorSender* sender, TensorReceiver* receiver) {
  (is_onward ? onward_ : back_) = sender;
  (is_onward ? arrives_ : returns_) = receiver;
}

void StageEdge::send_onward(const EdgeMessage& message, PipelineValue value) {
  const auto micro_batch = static_cast<size_t>(message.micro_batch);
  std::vector<bool> needs_gradient;
  for (const at::Tensor& tensor : value.tensors)
    needs_gradient.push_back(tensor.defined() && tensor.requires_grad());
  due_[micro_batch] = any(needs_gradient);
  if (!is_local_) {
    send(*onward_, message, std::move(value));
    return;
  }
  for (at::Tensor& tensor : value.tensors)
    if (tensor.defined()) tensor = tensor.detach();
  inputs_[micro_batch] = {std::move(value), std::move(needs_gradient)};
}

StageInput StageEdge::receive_onward(const EdgeMessage& message) {
  const auto micro_batch = static_cast<size_t>(message.micro_batch);
  StageInput input;
  if (is_local_) {
    input = std::exchange(inputs_[micro_batch], StageInput());
  } else {
    TensorMessage got = arrives_->receive(message.step, message.micro_batch, message.label);
    input = {{std::move(got.tensors), std::move(got.text)}, std::move(got.requires_grad)};
  }
  TORCH_INTERNAL_ASSERT(names_.empty() || input.value.tensors.size() == names_.size());
  due_[micro_batch] = any(input.needs_gradient);
  return input;
}

void StageEdge::send_back(const EdgeMessage& message, Tensors gradients) {
  if (is_local_) {
    gradients_[static_cast<size_t>(message.micro_batch)] = std::move(gradients);
  } else {
    send(*back_, message, {std::move(gradients)});
  }
}

Tensors StageEdge::receive_back(const EdgeMessage& message) {
  if (is_local_)
    return std::exchange(gradients_[static_cast<size_t>(message.micro_batch)], Tensors());
  return returns_->receive(message.step, message.micro_batch, message.label).tensors;
}

void StageEdge::done_with_input() {
  if (arrives_ != nullptr) arrives_->done_with_one();
}

void StageEdge::done_with_gradients(int64_t micro_batch) {
  if (returns_ != nullptr && is_due(micro_batch)) returns_->done_with_one();
}

void StageEdge::abandon() {
  std::fill(inputs_.begin(), inputs_.end(), StageInput());
  std::fill(gradients_.begin(), gradients_.end(), Tensors());
}

}  // namespace trireme
