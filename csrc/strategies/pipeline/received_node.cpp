#include <trireme/strategies/pipeline/received_node.h>

#include <torch/csrc/autograd/functions/utils.h>

#include <utility>

namespace trireme {

using torch::autograd::variable_list;

NodePtr ReceivedNode::put_behind(const std::vector<at::Tensor>& tensors,
                                 const std::vector<bool>& needs_gradient) {
  NodePtr made;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!needs_gradient[i]) continue;
    if (!made) {
      made = make_node<ReceivedNode>();
      static_cast<ReceivedNode&>(*made).place_.assign(tensors.size(), -1);
    }
    auto& node = static_cast<ReceivedNode&>(*made);
    node.place_[i] = node.num_inputs();
    torch::autograd::set_history(tensors[i], made);
  }
  return made;
}

variable_list ReceivedNode::apply(variable_list&& gradients) {
  gradients_ = std::move(gradients);
  return {};
}

std::vector<at::Tensor> ReceivedNode::take_gradients() {
  std::vector<at::Tensor> taken(place_.size());
  for (size_t i = 0; i < place_.size() && !gradients_.empty(); ++i) {
    if (place_[i] >= 0) taken[i] = std::move(gradients_[static_cast<size_t>(place_[i])]);
  }
  gradients_.clear();
  return taken;
}

}  // namespace trireme
