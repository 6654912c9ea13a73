#include <trireme/strategies/pipeline/micro_batches.h>

#include <trireme/comm/agree.h>
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

// Returns how many rows a batch of this rank has, or a complaint.
std::string describe(const BatchRequest& batch) {
  if (batch.inputs.empty()) return as_complaint(complaint({}, batch));
  std::string rows;
  for (const at::Tensor& input : batch.inputs) {
    const std::string wrong = complaint(input, batch);
    if (!wrong.empty()) return as_complaint(wrong);
    rows += (rows.empty() ? "" : ", ") + std::to_string(input.size(batch.dim));
  }
  return rows + (batch.target.defined() ? " rows" : " rows without targets");
}

void agree_on_rows(const std::string& own, Communicator& communicator) {
  const std::vector<std::string> texts =
      distinct_texts({own, "batch of a step"}, communicator, communicator.device());
  const auto refuse = [&](size_t rank, const std::string& got) {
    const RankOf where{static_cast<int64_t>(rank), communicator.world()};
    TORCH_CHECK_VALUE(false,
                      error_text("pipeline", got, where, "Give every rank the whole batch."));
  };
  if (const auto wrong = first_complaint(texts)) refuse(wrong->rank, "got " + wrong->text);
  if (const auto differs = first_difference(texts))
    refuse(differs->rank,
           "got a batch of " + differs->other + ", expected " + differs->first + " as on rank 0");
}

}  // namespace

MicroBatches cut_batch(const BatchRequest& batch, Communicator& communicator) {
  agree_on_rows(describe(batch), communicator);
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
