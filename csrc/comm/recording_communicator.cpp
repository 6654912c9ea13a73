#include <trireme/comm/recording_communicator.h>

#include <ATen/ATen.h>

#include <utility>

namespace trireme {

RecordingCommunicator::RecordingCommunicator(std::shared_ptr<Communicator> inner)
    : inner_(std::move(inner)), where_(inner_->rank_of()) {}

RecordingCommunicator::RecordingCommunicator(RankOf where) : where_(where) {}

void RecordingCommunicator::note(const char* verb, const std::string& label,
                                 const std::vector<at::Tensor>& tensors) {
  WireRecord record{verb, label, 0, {}};
  for (const at::Tensor& tensor : tensors) {
    if (tensor.layout() == at::kStrided) record.bytes += static_cast<int64_t>(tensor.nbytes());
    record.dtypes.emplace_back(c10::toString(tensor.scalar_type()));
  }
  records_.push_back(std::move(record));
}

Pending RecordingCommunicator::all_reduce(std::vector<at::Tensor> tensors, ReduceOp op,
                                          std::string label) {
  note("all_reduce", label, tensors);
  if (inner_) return inner_->all_reduce(std::move(tensors), op, std::move(label));
  if (op == ReduceOp::kSum) {
    for (at::Tensor& tensor : tensors) tensor.mul_(where_.world);
  }
  return {};
}

Pending RecordingCommunicator::broadcast(std::vector<at::Tensor> tensors, int64_t root,
                                         std::string label) {
  note("broadcast", label, tensors);
  if (inner_) return inner_->broadcast(std::move(tensors), root, std::move(label));
  return {};
}

Pending RecordingCommunicator::all_gather(std::vector<at::Tensor> outputs,
                                          std::vector<at::Tensor> inputs, std::string label) {
  note("all_gather", label, inputs);
  if (inner_) return inner_->all_gather(std::move(outputs), std::move(inputs), std::move(label));
  for (size_t i = 0; i < inputs.size(); ++i) {
    // A copy, since the input may be a part of the output.
    outputs[i].view({where_.world, -1}).copy_(inputs[i].view({1, -1}).clone());
  }
  return {};
}

Pending RecordingCommunicator::reduce_scatter(std::vector<at::Tensor> outputs,
                                              std::vector<at::Tensor> inputs, ReduceOp op,
                                              std::string label) {
  note("reduce_scatter", label, inputs);
  if (inner_) {
    return inner_->reduce_scatter(std::move(outputs), std::move(inputs), op, std::move(label));
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    outputs[i].view({-1}).copy_(inputs[i].view({where_.world, -1})[where_.rank]);
    if (op == ReduceOp::kSum) outputs[i].mul_(where_.world);
  }
  return {};
}

Pending RecordingCommunicator::send(std::vector<at::Tensor> tensors, int64_t to,
                                    std::string label) {
  note("send", message_text("send", to, label, where_), tensors);
  return inner_ ? inner_->send(std::move(tensors), to, std::move(label)) : Pending();
}

Pending RecordingCommunicator::recv(std::vector<at::Tensor> tensors, int64_t from,
                                    std::string label) {
  note("recv", message_text("recv", from, label, where_), tensors);
  return inner_ ? inner_->recv(std::move(tensors), from, std::move(label)) : Pending();
}

Pending RecordingCommunicator::barrier(std::string label) {
  note("barrier", label, {});
  return inner_ ? inner_->barrier(std::move(label)) : Pending();
}

void RecordingCommunicator::announce_failure(const std::string& reason) noexcept {
  if (inner_) return inner_->announce_failure(reason);
  failure_ = reason;
}

void RecordingCommunicator::recover() {
  if (inner_) inner_->recover();
}

std::optional<std::string> RecordingCommunicator::failure() const {
  return inner_ ? inner_->failure() : failure_;
}

}  // namespace trireme
