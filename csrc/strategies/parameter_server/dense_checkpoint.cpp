#include <trireme/strategies/parameter_server/dense_checkpoint.h>

#include <trireme/kernels/optimizer_step.h>
#include <trireme/strategies/parameter_server/table_plan.h>

#include <ATen/ATen.h>

namespace trireme::ps {
namespace {

int64_t count_blocks(const ParameterInfo& info) {
  return (info.numel + kBlockNumel - 1) / kBlockNumel;
}

// Returns the number of steps of each block: that of the row that it begins in.
at::Tensor steps_of_blocks(const at::Tensor& steps_by_row, const ParameterInfo& info) {
  const int64_t row = info.numel / info.sizes.front();
  return steps_by_row.index_select(
      0, at::arange(0, info.numel, kBlockNumel, at::kLong).floor_divide(row));
}

// Returns the number of steps of each row of a share.
at::Tensor steps_of_rows(const at::Tensor& steps, const TableShare& share,
                         const ParameterInfo& info) {
  const int64_t row = info.numel / info.sizes.front();
  return steps.index_select(0,
                            at::arange(share.rows, at::kLong).mul_(row).floor_divide(kBlockNumel));
}

}  // namespace

// Each share has its values, its states and the step counts of its blocks, one share after the
// other.
size_t DenseCheckpoint::count_share_tensors(int64_t host) const {
  const size_t states = this->states();
  return layout_.shares_of(host).size() * (2 + states);
}

std::vector<at::Tensor> DenseCheckpoint::share_tensors() const {
  std::vector<at::Tensor> tensors;
  for (int64_t i = 0; i < static_cast<int64_t>(steps_.values().size()); ++i) {
    tensors.push_back(steps_.values()[static_cast<size_t>(i)]);
    for (int64_t state = 0; state < count_states(spec_.optimizer); ++state)
      tensors.push_back(steps_.state(state, i));
    tensors.push_back(steps_.step_counts(i));
  }
  return tensors;
}

// Lists the checkpoint's tensors of the table: values under kModelTensors; states and numbers of
// steps under kTableTensors.
CheckpointContent DenseCheckpoint::described(const std::string& prefix) const {
  CheckpointContent content;
  std::vector<CheckpointTensor>& states = content.tensors[kTableTensors];
  for (const ParameterInfo& info : layout_.tensors) {
    content.tensors[kModelTensors].push_back({prefix + info.name, info.dtype, info.sizes});
    const std::string before = spec_.name + "." + info.name + ".";
    for (const std::string& state : names_of_states(spec_.optimizer))
      states.push_back({before + state, optimizer_state_dtype(info.dtype), info.sizes});
    states.push_back({before + "steps", at::kLong, {count_blocks(info)}});
  }
  if (has_learning_rate(spec_.optimizer)) states.push_back({spec_.name + ".lr", at::kDouble, {}});
  return content;
}

CheckpointContent DenseCheckpoint::content(const std::string& prefix,
                                           const SharesByHost& shares) const {
  CheckpointContent content = described(prefix);
  std::vector<CheckpointTensor>& model = content.tensors[kModelTensors];
  std::vector<CheckpointTensor>& others = content.tensors[kTableTensors];
  const size_t states = this->states();
  std::vector<std::vector<at::Tensor>> parts((2 + states) * layout_.tensors.size());
  std::vector<size_t> next(shares.size(), 0);
  for (const TableShare& share : layout_.shares) {
    const auto host = static_cast<size_t>(share.host);
    const auto tensor = static_cast<size_t>(share.tensor);
    for (size_t i = 0; i < 2 + states; ++i) {
      at::Tensor part = shares[host].at(next[host]++);
      if (i == 1 + states && !share.is_whole)
        part = steps_of_rows(part, share, layout_.tensors[tensor]);
      parts[tensor * (2 + states) + i].push_back(std::move(part));
    }
  }
  const auto whole = [&](size_t tensor, size_t i) {
    const std::vector<at::Tensor>& found = parts[tensor * (2 + states) + i];
    return found.size() == 1 ? found.front() : at::cat(found);
  };
  for (size_t tensor = 0; tensor < model.size(); ++tensor) {
    model[tensor].part = {whole(tensor, 0)};
    for (size_t i = 1; i < 2 + states; ++i)
      others[tensor * (1 + states) + i - 1].part = {whole(tensor, i)};
    if (parts[tensor * (2 + states)].size() > 1) {
      at::Tensor& steps = others[tensor * (1 + states) + states].part.values;
      steps = steps_of_blocks(steps, layout_.tensors[tensor]);
    }
  }
  if (has_learning_rate(spec_.optimizer)) others.back().part = {steps_.learning_rate()};
  return content;
}

CheckpointContent DenseCheckpoint::places(const std::string& prefix) const {
  const CheckpointContent all = described(prefix);
  const size_t states = this->states();
  const std::vector<TableShare>& own = layout_.own_shares;
  CheckpointContent content;
  std::vector<CheckpointTensor>& model = content.tensors[kModelTensors];
  std::vector<CheckpointTensor>& others = content.tensors[kTableTensors];
  for (size_t i = 0; i < own.size(); ++i) {
    const auto tensor = static_cast<size_t>(own[i].tensor);
    std::vector<int64_t> first;
    if (!own[i].is_whole) {
      first.resize(layout_.tensors[tensor].sizes.size(), 0);
      first.front() = own[i].first;
    }
    const auto add = [&](std::vector<CheckpointTensor>& to, CheckpointTensor entry,
                         at::Tensor values) {
      entry.part = {std::move(values), first};
      to.push_back(std::move(entry));
    };
    add(model, all.tensors.at(kModelTensors)[tensor], steps_.values()[i]);
    for (size_t state = 0; state < states; ++state)
      add(others, all.tensors.at(kTableTensors)[tensor * (1 + states) + state],
          steps_.state(static_cast<int64_t>(state), static_cast<int64_t>(i)));
    if (own[i].is_whole)
      add(others, all.tensors.at(kTableTensors)[tensor * (1 + states) + states],
          steps_.step_counts(static_cast<int64_t>(i)));
  }
  if (has_learning_rate(spec_.optimizer)) {
    others.push_back(all.tensors.at(kTableTensors).back());
    others.back().part = {steps_.learning_rate()};
  }
  return content;
}

// Reads the numbers of steps of tensors that are cut over hosts.
void DenseCheckpoint::read_rest(const CheckpointReader& reader) const {
  const std::vector<TableShare>& own = layout_.own_shares;
  for (size_t i = 0; i < own.size(); ++i) {
    if (own[i].is_whole) continue;
    const ParameterInfo& info = layout_.tensors[static_cast<size_t>(own[i].tensor)];
    const at::Tensor whole = at::empty({count_blocks(info)}, at::kLong);
    reader.read(
        kTableTensors,
        {{spec_.name + "." + info.name + ".steps", at::kLong, whole.sizes().vec(), {whole}}});
    const at::Tensor blocks = steps_.step_counts(static_cast<int64_t>(i));
    const int64_t begin = own[i].first * (info.numel / info.sizes.front());
    blocks.copy_(whole.index_select(0, at::arange(blocks.numel(), at::kLong)
                                           .mul_(kBlockNumel)
                                           .add_(begin)
                                           .floor_divide(kBlockNumel)));
  }
}

}  // namespace trireme::ps
