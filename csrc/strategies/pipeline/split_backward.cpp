#include <trireme/strategies/pipeline/split_backward.h>

#include <trireme/strategies/pipeline/received_node.h>

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <utility>

namespace trireme {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

// The rest that the first half leaves of a node from which edges lead to weights only.
struct SplitBackward::Kept {
  NodePtr node;
  edge_list weight_edges;  // all edges of the node, those on input paths invalid
  variable_list gradients;
};

// Keeps the gradients that come to a node, after all hooks of tensors.
class SplitBackward::Keeper final : public torch::autograd::FunctionPreHook {
 public:
  explicit Keeper(std::weak_ptr<Kept> kept) : kept_(std::move(kept)) {}
  variable_list operator()(const variable_list& gradients) override {
    if (const auto kept = kept_.lock()) kept->gradients = gradients;
    return gradients;
  }

 private:
  std::weak_ptr<Kept> kept_;
};

// Calls a node for its weights. It has the sequence number of the node, so that it runs in its
// turn.
class SplitBackward::StandIn final : public Node {
 public:
  StandIn(NodePtr node, edge_list edges)
      : Node(node->sequence_nr(), std::move(edges)), node_(std::move(node)) {}
  std::string name() const override { return "TriremeWeightHalf"; }
  variable_list apply(variable_list&& gradients) override {
    node_->will_release_variables();
    variable_list outputs = (*node_)(std::move(gradients));
    node_->release_variables();
    for (size_t i = 0; i < outputs.size(); ++i)
      if (!next_edge(i).is_valid()) outputs[i].reset();
    return outputs;
  }

 private:
  NodePtr node_;
};

// Visits each node of the graph once, and finds on which kinds of path it is.
class SplitBackward::Walk {
 public:
  struct Found {
    bool to_input = false;
    bool to_weight = false;
  };

  Walk(const edge_list& roots, const Node* received) : received_(received) {
    for (const Edge& root : roots) visit(root.function);
  }

  const Found& at(const Node* node) const { return found_.at(node); }
  // Returns the nodes, each behind the nodes that its edges lead to.
  const std::vector<NodePtr>& nodes() const { return nodes_; }

 private:
  struct Open {
    NodePtr node;
    size_t next = 0;
  };

  void visit(const NodePtr& root) {
    if (!found_.emplace(root.get(), Found()).second) return;
    std::vector<Open> open{{root}};
    while (!open.empty()) {
      Open& top = open.back();
      if (top.next < top.node->num_outputs()) {
        const Edge& edge = top.node->next_edge(top.next++);
        if (edge.is_valid() && found_.emplace(edge.function.get(), Found()).second)
          open.push_back({edge.function});
      } else {
        close(top.node);
        nodes_.push_back(std::move(top.node));
        open.pop_back();
      }
    }
  }

  void close(const NodePtr& node) {
    if (node.get() == received_) {
      found_[node.get()].to_input = true;
      return;
    }
    Found found;
    bool is_sink = true;
    for (const Edge& edge : node->next_edges()) {
      if (!edge.is_valid()) continue;
      is_sink = false;
      const Found& behind = found_.at(edge.function.get());
      found.to_input |= behind.to_input;
      found.to_weight |= behind.to_weight;
    }
    found.to_weight |= is_sink;
    found_[node.get()] = found;
  }

  const Node* received_;
  ska::flat_hash_map<const Node*, Found> found_;
  std::vector<NodePtr> nodes_;
};

SplitBackward::SplitBackward(edge_list roots, std::vector<at::Tensor> gradients,
                             const NodePtr& received)
    : roots_(std::move(roots)), gradients_(std::move(gradients)), received_(received) {}

SplitBackward::~SplitBackward() = default;

std::vector<at::Tensor> SplitBackward::input_half() {
  if (!received_) return {};
  const Walk walk(roots_, received_.get());
  const std::vector<NodePtr> inner = prepare(walk);
  std::vector<at::Tensor> found = run_input_half(walk);
  for (const NodePtr& node : inner) node->release_variables();
  return found;
}

std::vector<NodePtr> SplitBackward::prepare(const Walk& walk) {
  std::vector<NodePtr> inner;  // on input paths, and needed for nothing else
  for (const NodePtr& node : walk.nodes()) {
    const Walk::Found& found = walk.at(node.get());
    if (!found.to_input) {
      if (node->num_outputs() == 0) sinks_.emplace_back(node, 0);
      continue;
    }
    if (node == received_) continue;
    auto kept = std::make_shared<Kept>();
    bool meets = false;
    for (const Edge& edge : node->next_edges()) {
      const bool is_weight = edge.is_valid() && !walk.at(edge.function.get()).to_input;
      meets |= is_weight;
      kept->weight_edges.push_back(is_weight ? edge : Edge());
    }
    if (!meets) {
      inner.push_back(node);
      continue;
    }
    kept->node = node;
    node->add_pre_hook(std::make_unique<Keeper>(kept));
    kept_.push_back(std::move(kept));
  }
  return inner;
}

// Runs what leads to inputs, and leaves the other roots to the second half.
std::vector<at::Tensor> SplitBackward::run_input_half(const Walk& walk) {
  edge_list roots;
  variable_list gradients;
  edge_list weight_roots;
  variable_list weight_gradients;
  for (size_t i = 0; i < roots_.size(); ++i) {
    const bool to_input = walk.at(roots_[i].function.get()).to_input;
    (to_input ? roots : weight_roots).push_back(std::move(roots_[i]));
    (to_input ? gradients : weight_gradients).push_back(std::move(gradients_[i]));
  }
  roots_ = std::move(weight_roots);
  gradients_ = std::move(weight_gradients);
  const auto& node = static_cast<const ReceivedNode&>(*received_);
  std::vector<at::Tensor> found(node.tensors());
  if (roots.empty()) return found;
  edge_list inputs;
  for (size_t i = 0; i < found.size(); ++i)
    if (node.place_of(i) >= 0)
      inputs.emplace_back(received_, static_cast<uint32_t>(node.place_of(i)));
  variable_list came = torch::autograd::Engine::get_default_engine().execute(
      roots, gradients, /*keep_graph=*/true, /*create_graph=*/false, /*accumulate_grad=*/false,
      inputs);
  size_t next = 0;
  for (size_t i = 0; i < found.size(); ++i)
    if (node.place_of(i) >= 0) found[i] = std::move(came[next++]);
  return found;
}

void SplitBackward::weight_half() {
  for (const std::shared_ptr<Kept>& kept : kept_) {
    if (kept->gradients.empty()) continue;  // no gradient came this way
    const NodePtr stand_in =
        make_node<StandIn>(std::move(kept->node), std::move(kept->weight_edges));
    for (at::Tensor& gradient : kept->gradients) {
      const auto place = static_cast<uint32_t>(
          gradient.defined() ? stand_in->add_input_metadata(gradient)
                             : stand_in->add_input_metadata(Node::undefined_input()));
      roots_.emplace_back(stand_in, place);
      gradients_.push_back(std::move(gradient));
    }
  }
  kept_.clear();
  if (!roots_.empty()) {
    torch::autograd::Engine::get_default_engine().execute(roots_, gradients_, /*keep_graph=*/false,
                                                          /*create_graph=*/false,
                                                          /*accumulate_grad=*/true, sinks_);
  }
  roots_.clear();
  gradients_.clear();
  sinks_.clear();
  received_.reset();
}

}  // namespace trireme
