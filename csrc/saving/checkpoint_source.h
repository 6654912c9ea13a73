#pragma once

#include <trireme/common/export.h>
#include <trireme/saving/checkpoint.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

// What ranks load from: files (checkpoint_reader.h), or the memory of the ranks that hold it
// (held_checkpoint.h).
class TRIREME_API CheckpointSource {
 public:
  virtual ~CheckpointSource() = default;

  // Returns whether it has tensors of a kind, be it none.
  virtual bool has(const std::string& kind) const = 0;
  // Returns the tensors of a kind, without parts, by name; none if it has none.
  virtual const std::map<std::string, CheckpointTensor>& tensors(const std::string& kind) const = 0;
  // Returns kOptimizerText or kExtraText, a JSON object; empty if there is none.
  virtual std::string text(const std::string& name) const = 0;

  // Compares the bytes of all tensors of these kinds with their checksums, where it has any. To be
  // called before anything is changed. Collective, with the same kinds on all ranks; throws
  // ValueError naming a file and a tensor.
  virtual void verify(const std::vector<std::string>& /*kinds*/) const {}

  // Checks that the `tensors` of all ranks together are its tensors, whatever their parts.
  // Collective; throws ValueError naming a tensor that is missing, that no rank has, or that has
  // another dtype or shape.
  void check(const std::string& kind, const std::vector<CheckpointTensor>& tensors) const;

  // Reads into the parts, in place. Collective; after a failure some may have been read.
  virtual void read(const std::string& kind,
                    const std::vector<CheckpointTensor>& tensors) const = 0;

 protected:
  explicit CheckpointSource(CheckpointRanks ranks) : ranks_(std::move(ranks)) {}
  // Returns where it is, for messages: "in '/data/checkpoint'".
  virtual std::string place() const = 0;
  void check_one(const std::string& kind, const CheckpointTensor& tensor) const;
  [[noreturn]] void refuse(const std::string& got, const std::string& next_step) const;

  CheckpointRanks ranks_;
};

}  // namespace trireme
