#include <trireme/strategies/pipeline/micro_batches.h>

#include <trireme/comm/gather_texts.h>
#include <trireme/common/error.h>

#include <ATen/ATen.h>

#include <string>
#include <utility>

namespace trireme {
namespace {

// Returns what is wrong with an input of this rank, or nothing.
std::string complaint(const at::Tensor& input, const BatchRequest& batch) {
  const auto& [inputs, target, dim, chunks] = batch;
  if (!input.defined() || input.dim() <= dim)
    return "no batch with a dimension " + std::to_string(dim);
  const int64_t rows = input.size(dim);
  if (rows < chunks) {
    return "a batch of " + std::to_string(rows) + " rows, expected one or more for each of " +
           std::to_string(chunks) + " micro-batches";
  }
  if (target.defined() && (target.dim() <= dim || target.size(dim) != rows)) {
    return "targets for " + std::to_string(target.dim() <= dim ? 0 : target.size(dim)) +
           " rows, expected them for " + std::to_string(rows);
  }
  return "";
}

// Returns what is wrong with a batch of this rank, behind a mark, or how many rows it has.
std::string describe(const BatchRequest& batch) {
  if (batch.inputs.empty()) return "!" + complaint({}, batch);
  std::string rows;
  for (const at::Tensor& input : batch.inputs) {
    const std::string wrong = complaint(input, batch);
    if (!wrong.empty()) return "!" + wrong;
    rows += (rows.empty() ? "" : ", ") + std::to_string(input.size(batch.dim));
  }
  return rows + (batch.target.defined() ? " rows" : " rows without targets");
}

}  // namespace

MicroBatches cut_batch(const BatchRequest& batch, Communicator& communicator) {
  const auto texts = gather_texts(describe(batch), communicator, communicator.device());
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const RankOf where{static_cast<int64_t>(rank), communicator.world()};
    TORCH_CHECK_VALUE(texts[rank].front() != '!',
                      error_text("pipeline", "got " + texts[rank].substr(1), where,
                                 "Give every rank the whole batch."));
    TORCH_CHECK_VALUE(
        texts[rank] == texts[0],
        error_text("pipeline",
                   "got a batch of " + texts[rank] + ", expected " + texts[0] + " as on rank 0",
                   where, "Give every rank the whole batch."));
  }
  MicroBatches cut;
  cut.versions = std::make_shared<BatchVersions>();
  const auto pieces_of = [&](const at::Tensor& tensor) {
    cut.has_graph = cut.has_graph || (tensor.requires_grad() && !tensor.is_leaf());
    std::vector<at::Tensor> pieces = tensor.tensor_split(batch.chunks, batch.dim);
    for (size_t i = 0; i < pieces.size(); ++i) {
      if (!pieces[i].requires_grad())
        pieces[i] = cut.versions->apart(pieces[i], static_cast<int64_t>(i));
    }
    return pieces;
  };
  cut.inputs.resize(static_cast<size_t>(batch.chunks));
  for (const at::Tensor& input : batch.inputs) {
    std::vector<at::Tensor> pieces = pieces_of(input);
    for (size_t i = 0; i < pieces.size(); ++i)
      cut.inputs[i].tensors.push_back(std::move(pieces[i]));
  }
  if (batch.target.defined()) cut.targets = pieces_of(batch.target);
  return cut;
}

}  // namespace trireme
