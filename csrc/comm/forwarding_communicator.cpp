#include <trireme/comm/forwarding_communicator.h>

#include <utility>

namespace trireme {

using Tensors = std::vector<at::Tensor>;

ForwardingCommunicator::ForwardingCommunicator(std::shared_ptr<Communicator> inner)
    : inner_(std::move(inner)) {}

Pending ForwardingCommunicator::all_reduce(Tensors tensors, ReduceOp op, std::string label) {
  return inner_->all_reduce(std::move(tensors), op, std::move(label));
}

Pending ForwardingCommunicator::broadcast(Tensors tensors, int64_t root, std::string label) {
  return inner_->broadcast(std::move(tensors), root, std::move(label));
}

Pending ForwardingCommunicator::all_gather(Tensors outputs, Tensors inputs, std::string label) {
  return inner_->all_gather(std::move(outputs), std::move(inputs), std::move(label));
}

Pending ForwardingCommunicator::reduce_scatter(Tensors outputs, Tensors inputs, ReduceOp op,
                                               std::string label) {
  return inner_->reduce_scatter(std::move(outputs), std::move(inputs), op, std::move(label));
}

Pending ForwardingCommunicator::send(Tensors tensors, int64_t to, std::string label) {
  return inner_->send(std::move(tensors), to, std::move(label));
}

Pending ForwardingCommunicator::recv(Tensors tensors, int64_t from, std::string label) {
  return inner_->recv(std::move(tensors), from, std::move(label));
}

Pending ForwardingCommunicator::barrier(std::string label) {
  return inner_->barrier(std::move(label));
}

void ForwardingCommunicator::announce_failure(const std::string& reason) noexcept {
  inner_->announce_failure(reason);
}

void ForwardingCommunicator::show_step(int64_t number, bool is_done) noexcept {
  inner_->show_step(number, is_done);
}

}  // namespace trireme
