#pragma once

#include <trireme/saving/checkpoint_source.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace trireme {

// An open checkpoint; see [Note: saving and loading without gathering] in checkpoint.h.
class TRIREME_API CheckpointReader final : public CheckpointSource {
 public:
  // Collective. Throws ValueError for an incomplete checkpoint, naming file and tensor.
  // `reads_once`: of what several ranks need each element is read by one of them, which sends it to
  // the others, where else each rank reads it. The same on all ranks.
  CheckpointReader(const std::string& path, CheckpointRanks ranks, bool reads_once = false);

  bool has(const std::string& kind) const override;
  const std::map<std::string, CheckpointTensor>& tensors(const std::string& kind) const override;
  // Returns a text as it was saved.
  std::string text(const std::string& name) const override;
  void read(const std::string& kind, const std::vector<CheckpointTensor>& tensors) const override;

 private:
  struct Place {
    size_t file = 0;
    size_t entry = 0;
  };
  struct Kind {
    std::vector<SafetensorsFile> files;
    std::map<std::string, Place> places;  // by name of the tensor
    std::map<std::string, CheckpointTensor> tensors;
    std::string save;
  };
  void open_all(const CheckpointPlace& place);
  CheckpointIndex index_of_one(const std::string& file) const;
  void check_others(const CheckpointIndex& model) const;
  int64_t bytes_of(const std::string& name, const std::string& holding) const;
  void open(const std::string& kind, const CheckpointIndex& index);
  void take_file(Kind& opened, const CheckpointIndex& index, SafetensorsFile file,
                 const std::string& name) const;
  void compare_saves() const;
  std::string place() const override;
  void read_own(const std::string& kind, const std::vector<CheckpointTensor>& tensors) const;
  void read_once(const std::string& kind, const std::vector<CheckpointTensor>& tensors) const;

  std::string folder_;
  bool reads_once_;
  std::map<std::string, Kind> kinds_;
  std::map<std::string, std::string> texts_;  // by file name
};

}  // namespace trireme
