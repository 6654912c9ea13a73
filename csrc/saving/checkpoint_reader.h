#pragma once

#include <trireme/saving/checkpoint.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace trireme {

// An open checkpoint; see [Note: saving and loading without gathering] in checkpoint.h.
class TRIREME_API CheckpointReader {
 public:
  // Collective. Throws ValueError for an incomplete checkpoint, naming file and tensor.
  CheckpointReader(const std::string& path, CheckpointRanks ranks);

  // Returns the tensors of a kind, without parts, by name; none if the checkpoint has none.
  const std::map<std::string, CheckpointTensor>& tensors(const std::string& kind) const;
  // Returns kOptimizerText or kExtraText, a JSON object as it was saved; empty if there is none.
  std::string text(const std::string& name) const;

  // Checks that the `tensors` of all ranks together are the checkpoint's tensors, whatever their
  // parts. Collective; throws ValueError naming a tensor that is missing, that no rank has, or that
  // has another dtype or shape.
  void check(const std::string& kind, const std::vector<CheckpointTensor>& tensors) const;

  // Reads into the parts, in place. Collective; after a failure some may have been read.
  void read(const std::string& kind, const std::vector<CheckpointTensor>& tensors) const;

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
  void check_one(const Kind& opened, const CheckpointTensor& tensor) const;
  void compare_saves() const;
  [[noreturn]] void refuse(const std::string& got, const std::string& next_step) const;

  std::string folder_;
  CheckpointRanks ranks_;
  std::map<std::string, Kind> kinds_;
  std::map<std::string, std::string> texts_;  // by file name
};

}  // namespace trireme
