#include <trireme/strategies/parameter_server/embedding.h>

#include <trireme/module/autograd_node.h>
#include <trireme/module/backward_anchors.h>
#include <trireme/module/sends_gradients.h>
#include <trireme/strategies/parameter_server/id_places.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/nn/functional/embedding.h>

#include <string>
#include <utility>

namespace trireme::ps {
namespace {

// Pushes the gradients that it receives, which go nowhere else: an edge that it may have leads to
// an anchor, so that an owner's backward runs it.
class PushRows final : public torch::autograd::Node, public SendsGradients {
 public:
  PushRows(std::shared_ptr<SparseTable> table, at::Tensor ids, torch::autograd::edge_list edges)
      : Node(std::move(edges)), table_(std::move(table)), ids_(std::move(ids)) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    if (gradients[0].defined()) table_->push(ids_, gradients[0]);
    return torch::autograd::variable_list(num_outputs());
  }
  std::string name() const override { return "TriremePushRows"; }

 private:
  std::shared_ptr<SparseTable> table_;
  at::Tensor ids_;  // a copy if the user could write the original
};

}  // namespace

at::Tensor pull_with_gradient(const std::shared_ptr<SparseTable>& table, const at::Tensor& ids,
                              bool create) {
  at::Tensor rows = table->pull(ids.cpu(), create);
  // Rows get their history before they go to a device, so that the thread that calls backward
  // pushes.
  if (at::GradMode::is_enabled()) {
    torch::autograd::edge_list edges;
    if (const at::Tensor anchor = BackwardAnchors::make(); anchor.defined())
      edges.push_back(torch::autograd::impl::gradient_edge(anchor));
    at::Tensor own_ids = ids.detach().cpu().clone();
    torch::autograd::set_history(rows,
                                 make_node<PushRows>(table, std::move(own_ids), std::move(edges)));
  }
  return rows.to(ids.device());
}

UniqueRows pull_unique_with_gradient(const std::shared_ptr<SparseTable>& table,
                                     const at::Tensor& ids, bool create) {
  at::Tensor whole = table->checked_ids(ids, "pull");
  at::Tensor places = at::empty(whole.sizes(), at::kLong);
  IdPlaces unique;
  unique.begin(whole.numel());
  const auto* id = whole.const_data_ptr<int64_t>();
  auto* place = places.data_ptr<int64_t>();
  bool is_new = false;
  for (int64_t i = 0; i < whole.numel(); ++i) place[i] = unique.place_of(id[i], is_new);
  const at::Tensor once = at::tensor(unique.ids(), at::kLong).to(ids.device());
  return {pull_with_gradient(table, once, create), places.to(ids.device())};
}

at::Tensor EmbeddingBagImpl::forward(const at::Tensor& ids, const at::Tensor& offsets,
                                     const at::Tensor& per_sample_weights) {
  const UniqueRows unique = pull_unique_with_gradient(table_, ids, is_training());
  torch::nn::functional::EmbeddingBagFuncOptions options;
  options.mode(mode_).offsets(offsets).per_sample_weights(per_sample_weights);
  return torch::nn::functional::embedding_bag(unique.places, unique.rows, options);
}

}  // namespace trireme::ps
