#pragma once

#include <trireme/common/export.h>
#include <trireme/module/sends_gradients.h>
#include <trireme/strategies/parameter_server/parameter_server.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/options/embedding.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <string_view>
#include <utility>

namespace trireme::ps {

// Pulls rows with a graph: their backward pushes the gradient of each id to the table, so that no
// parameter has a gradient and no optimizer steps. A backward that runs twice (retain_graph) pushes
// twice. The thread that runs the backward pushes. Without grad mode this is table.pull(). Throws
// what pull() and push() throw.
TRIREME_API at::Tensor pull_with_gradient(const std::shared_ptr<SparseTable>& table,
                                          const at::Tensor& ids, bool create = true);

// The rows of the distinct ids of an input, and for each id of the input the index of its row.
struct UniqueRows {
  at::Tensor rows;    // [distinct ids, dim], in the order of first occurrence
  at::Tensor places;  // int64, of the input's shape
};
TRIREME_API UniqueRows pull_unique_with_gradient(const std::shared_ptr<SparseTable>& table,
                                                 const at::Tensor& ids, bool create = true);

// Looks rows up in a sparse table, as torch::nn::Embedding does in a parameter; its backward
// pushes. It has no parameters. In eval mode, ids that have no row make none. It looks up ids on
// any device.
//   trireme::ps::Embedding items(server, "items");
class TRIREME_API EmbeddingImpl : public torch::nn::Module, public SendsGradients {
 public:
  EmbeddingImpl(ParameterServer& server, std::string_view table)
      : table_(server.shared_sparse(table)) {}

  // Returns [*ids.shape, dim].
  at::Tensor forward(const at::Tensor& ids) {
    return pull_with_gradient(table_, ids, is_training());
  }
  SparseTable& table() { return *table_; }

 private:
  std::shared_ptr<SparseTable> table_;
};
TORCH_MODULE(Embedding);

// Reduces rows of bags by torch's embedding_bag; each id is pulled and pushed once per forward.
class TRIREME_API EmbeddingBagImpl : public torch::nn::Module, public SendsGradients {
 public:
  EmbeddingBagImpl(ParameterServer& server, std::string_view table,
                   torch::nn::EmbeddingBagMode mode = torch::kMean)
      : table_(server.shared_sparse(table)), mode_(std::move(mode)) {}

  // Takes torch::nn::EmbeddingBag's arguments: ids [bags, ids of a bag], or [ids] with the offsets
  // at which bags begin; `per_sample_weights` under torch::kSum only. Returns [bags, dim].
  at::Tensor forward(const at::Tensor& ids, const at::Tensor& offsets = {},
                     const at::Tensor& per_sample_weights = {});
  SparseTable& table() { return *table_; }

 private:
  std::shared_ptr<SparseTable> table_;
  torch::nn::EmbeddingBagMode mode_;
};
TORCH_MODULE(EmbeddingBag);

}  // namespace trireme::ps
