#include <trireme/strategies/pipeline/threads/leaf_edges.h>

#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>
#include <vector>

namespace trireme {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;

void LeafEdges::add(const at::Tensor& leaf, const at::Tensor& stand_in) {
  Edge edge = torch::autograd::impl::gradient_edge(leaf);
  const Node* node = edge.function.get();
  stand_ins_.insert_or_assign(
      node, StandIn{std::move(edge), torch::autograd::impl::gradient_edge(stand_in)});
}

const Edge* LeafEdges::find(const Edge& edge) const {
  const auto found = stand_ins_.find(edge.function.get());
  return found == stand_ins_.end() ? nullptr : &found->second.edge;
}

void LeafEdges::redirect(edge_list& roots) const {
  if (empty()) return;
  std::unordered_set<const Node*> seen;
  std::vector<Node*> open;
  const auto visit = [&](const Edge& edge) {
    if (seen.insert(edge.function.get()).second) open.push_back(edge.function.get());
  };
  for (Edge& root : roots) {
    if (!root.is_valid()) continue;
    if (const Edge* other = find(root)) {
      root = *other;
    } else {
      visit(root);
    }
  }
  while (!open.empty()) {
    Node* node = open.back();
    open.pop_back();
    // set_next_edge() refuses a node that others lead to, whose place in the order of all nodes
    // might change. A leaf in place of a leaf changes none.
    for (Edge& edge : node->next_edges()) {
      if (!edge.is_valid()) continue;
      if (const Edge* other = find(edge)) {
        edge = *other;
      } else {
        visit(edge);
      }
    }
  }
}

}  // namespace trireme
