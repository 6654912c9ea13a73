#pragma once

#include <trireme/common/export.h>
#include <trireme/saving/checkpoint_source.h>

#include <map>
#include <set>
#include <string>
#include <vector>

namespace trireme {

// What ranks hold in memory, to be loaded by ranks that have other parts of it. In `content` each
// rank lists all that it holds, not only what it would write; values stay where they are.
struct HeldContent {
  CheckpointContent content;
  // Tensors of which ranks may hold different values (buffers): the lowest holder's count.
  std::set<std::string> of_lowest = {};
};

// A checkpoint that was never written; see [Note: redistributing without files] in redistribute.h.
class TRIREME_API HeldCheckpoint final : public CheckpointSource {
 public:
  // Collective. Throws ValueError if ranks differ about a tensor or cannot merge their texts. The
  // held values must not change while this lives.
  HeldCheckpoint(HeldContent held, CheckpointRanks ranks);

  bool has(const std::string& kind) const override;
  const std::map<std::string, CheckpointTensor>& tensors(const std::string& kind) const override;
  std::string text(const std::string& name) const override;
  void read(const std::string& kind, const std::vector<CheckpointTensor>& tensors) const override;

 private:
  std::string place() const override { return "in memory"; }

  HeldContent held_;
  std::map<std::string, std::map<std::string, CheckpointTensor>> tensors_;  // by kind and name
  std::map<std::string, std::string> texts_;
};

}  // namespace trireme
