#pragma once

#include <trireme/saving/checkpoint_source.h>

#include <map>
#include <string>
#include <vector>

namespace trireme {

// The optimizers of one checkpoint beside its own: of the tensors of a kind those whose names begin
// with a prefix, as the kind "optimizer". A text is a tensor of bytes there.
class TRIREME_API PrefixedSource final : public CheckpointSource {
 public:
  // `source` must outlive this. Collective.
  PrefixedSource(const CheckpointSource& source, std::string kind, std::string prefix,
                 CheckpointRanks ranks);

  bool has(const std::string& kind) const override;
  const std::map<std::string, CheckpointTensor>& tensors(const std::string& kind) const override;
  std::string text(const std::string& name) const override;
  void read(const std::string& kind, const std::vector<CheckpointTensor>& tensors) const override;

 private:
  std::string place() const override { return "under '" + prefix_ + "'"; }

  const CheckpointSource& source_;
  std::string kind_;
  std::string prefix_;
  std::map<std::string, CheckpointTensor> tensors_;  // by names without the prefix
  std::string text_;
};

// Returns a text as the tensor under which a PrefixedSource finds it.
TRIREME_API CheckpointTensor text_as_tensor(const std::string& prefix, const std::string& text);

}  // namespace trireme
