#include <trireme/strategies/pipeline/stage_edges.h>

#include <trireme/comm/make_channels.h>

#include <algorithm>
#include <utility>

namespace trireme {

StageEdges::StageEdges(const PipelineSchedule& schedule, Communicator& communicator)
    : micro_batches_(schedule.micro_batches),
      stage_rank_(schedule.stage_rank),
      ends_(static_cast<size_t>(schedule.stages)),
      inputs_(static_cast<size_t>(schedule.stages * schedule.micro_batches)),
      gradients_(inputs_.size()) {
  std::vector<ChannelRequest> requests;
  const std::vector<EdgeSlots> edges = check_schedule(schedule);
  for (const EdgeSlots& edge : edges) {
    requests.push_back(
        {stage_rank_[static_cast<size_t>(edge.edge.from)],
         stage_rank_[static_cast<size_t>(edge.edge.to)], edge.slots,
         "stage " + std::to_string(edge.edge.from) + " to stage " + std::to_string(edge.edge.to)});
  }
  channels_ = make_channels(communicator, std::move(requests));
  for (size_t i = 0; i < edges.size(); ++i) {
    const auto [from, to] = edges[i].edge;
    const bool is_onward = from < to;
    (is_onward ? ends(from).onward : ends(from).back) = channels_->sender(i);
    (is_onward ? ends(to).from_before : ends(to).from_next) = channels_->receiver(i);
  }
}

bool StageEdges::is_local(int64_t from, int64_t to) const {
  return stage_rank_[static_cast<size_t>(from)] == stage_rank_[static_cast<size_t>(to)];
}

void StageEdges::send_onward(const Message& message, const PipelineValue& outputs) {
  const auto& [step, stage, micro_batch, label] = message;
  if (!is_local(stage, stage + 1)) {
    ends(stage).onward->send({step, micro_batch, outputs.text, outputs.tensors}, label);
    return;
  }
  StageInput& input = inputs_[place(stage + 1, micro_batch)];
  input.value.text = outputs.text;
  for (const at::Tensor& tensor : outputs.tensors) {
    input.needs_gradient.push_back(tensor.defined() && tensor.requires_grad());
    input.value.tensors.push_back(tensor.defined() ? tensor.detach() : at::Tensor());
  }
}

void StageEdges::send_back(const Message& message, std::vector<at::Tensor> gradients) {
  const auto& [step, stage, micro_batch, label] = message;
  if (!is_local(stage, stage - 1)) {
    ends(stage).back->send({step, micro_batch, {}, std::move(gradients)}, label);
  } else {
    gradients_[place(stage - 1, micro_batch)] = std::move(gradients);
  }
}

StageInput StageEdges::receive_onward(const Message& message) {
  const auto& [step, stage, micro_batch, label] = message;
  if (is_local(stage - 1, stage)) return std::move(inputs_[place(stage, micro_batch)]);
  TensorMessage got = ends(stage).from_before->receive(step, micro_batch, label);
  return {{std::move(got.tensors), std::move(got.text)}, std::move(got.requires_grad)};
}

std::vector<at::Tensor> StageEdges::receive_back(const Message& message) {
  const auto& [step, stage, micro_batch, label] = message;
  if (is_local(stage + 1, stage)) return std::move(gradients_[place(stage, micro_batch)]);
  return std::move(ends(stage).from_next->receive(step, micro_batch, label).tensors);
}

void StageEdges::done_with_input(int64_t stage) {
  if (ends(stage).from_before != nullptr) ends(stage).from_before->done_with_one();
}

void StageEdges::done_with_gradients(int64_t stage) {
  if (ends(stage).from_next != nullptr) ends(stage).from_next->done_with_one();
}

void StageEdges::abandon() {
  std::fill(inputs_.begin(), inputs_.end(), StageInput());
  std::fill(gradients_.begin(), gradients_.end(), std::vector<at::Tensor>());
}

}  // namespace trireme
