#include <trireme/strategies/data_parallel/replica_node.h>

#include <trireme/common/error.h>
#include <trireme/module/autograd_node.h>
#include <trireme/strategies/data_parallel/replica_pass.h>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>

#include <string>
#include <utility>

namespace trireme {

class ReplicaNode final : public torch::autograd::Node {
 public:
  explicit ReplicaNode(std::shared_ptr<ReplicaPass> pass) : pass_(std::move(pass)) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !at::GradMode::is_enabled(),
        error_text("data_parallel",
                   "got a backward with create_graph=True, expected one without: the graphs of the "
                   "replicas are not part of the caller's",
                   {}, "Use trireme.data_parallel(module, inputs), whose graph is one."));
    return pass_->backward(gradients, torch::autograd::get_current_graph_task_keep_graph());
  }

  void release_variables() override { pass_->release(); }
  std::string name() const override { return "TriremeDataParallel"; }

 private:
  std::shared_ptr<ReplicaPass> pass_;
};

namespace {

class IdentityNode final : public torch::autograd::Node {
 public:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    return std::move(gradients);
  }
  std::string name() const override { return "TriremeReplicaInput"; }
};

}  // namespace

void set_replica_history(const std::vector<at::Tensor>& outputs,
                         torch::autograd::edge_list next_edges, std::shared_ptr<ReplicaPass> pass) {
  const auto node = make_node<ReplicaNode>(std::move(pass));
  node->set_next_edges(std::move(next_edges));
  for (const at::Tensor& output : outputs) torch::autograd::set_history(output, node);
}

at::Tensor computed_from(const at::Tensor& leaf) {
  const auto node = make_node<IdentityNode>();
  node->set_next_edges({torch::autograd::impl::gradient_edge(leaf)});
  at::Tensor computed = leaf.detach();
  torch::autograd::set_history(computed, node);
  return computed;
}

}  // namespace trireme
