#include <trireme/saving/prefixed_source.h>

#include <trireme/saving/checkpoint_files.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace trireme {

PrefixedSource::PrefixedSource(const CheckpointSource& source, std::string kind, std::string prefix,
                               CheckpointRanks ranks)
    : CheckpointSource(std::move(ranks)),
      source_(source),
      kind_(std::move(kind)),
      prefix_(std::move(prefix)) {
  std::vector<CheckpointTensor> text;
  for (const auto& [name, tensor] : source_.tensors(kind_)) {
    if (!name.starts_with(prefix_)) continue;
    const std::string own = name.substr(prefix_.size());
    if (own == kOptimizerText)
      text.push_back({name, tensor.dtype, tensor.sizes, {at::empty(tensor.sizes, at::kByte), {0}}});
    else
      tensors_.emplace(own, CheckpointTensor{own, tensor.dtype, tensor.sizes, {}});
  }
  source_.read(kind_, text);
  for (const CheckpointTensor& read : text) {
    const at::Tensor& bytes = read.part.values;
    text_.assign(reinterpret_cast<const char*>(bytes.const_data_ptr<uint8_t>()),
                 static_cast<size_t>(bytes.numel()));
  }
}

bool PrefixedSource::has(const std::string& kind) const {
  return kind == kOptimizerTensors && !text_.empty();
}

const std::map<std::string, CheckpointTensor>& PrefixedSource::tensors(
    const std::string& kind) const {
  static const std::map<std::string, CheckpointTensor> none;
  return kind == kOptimizerTensors ? tensors_ : none;
}

std::string PrefixedSource::text(const std::string& name) const {
  return name == kOptimizerText ? text_ : std::string();
}

void PrefixedSource::read(const std::string& /*kind*/,
                          const std::vector<CheckpointTensor>& tensors) const {
  std::vector<CheckpointTensor> named = tensors;
  for (CheckpointTensor& tensor : named) tensor.name = prefix_ + tensor.name;
  source_.read(kind_, named);
}

CheckpointTensor text_as_tensor(const std::string& prefix, const std::string& text) {
  const at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::copy(text.begin(), text.end(), reinterpret_cast<char*>(bytes.mutable_data_ptr<uint8_t>()));
  return {prefix + kOptimizerText, at::kByte, bytes.sizes().vec(), {bytes, {0}}};
}

}  // namespace trireme
