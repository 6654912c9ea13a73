#include <trireme/module/abandoned_nodes.h>

#include <trireme/module/autograd_node.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

namespace trireme {
namespace {

// The queue is in the order of these numbers, the highest first.
constexpr uint64_t kLast = 0;

class LastNode final : public torch::autograd::Node {
 public:
  LastNode() : Node(kLast) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& /*gradients*/) override {
    return {};
  }
};

}  // namespace

void free_abandoned_nodes() noexcept {
  if (torch::autograd::get_current_graph_task_id() != -1) return;
  try {
    const at::Tensor gradient = at::zeros({});
    auto node = make_node<LastNode>();
    node->add_input_metadata(gradient);
    torch::autograd::Engine::get_default_engine().execute(
        {torch::autograd::Edge(std::move(node), 0)}, {gradient}, /*keep_graph=*/false,
        /*create_graph=*/false, /*accumulate_grad=*/true);
  } catch (...) {  // the next backward frees them
  }
}

}  // namespace trireme
