#pragma once

#include <trireme/common/error.h>
#include <trireme/memory/tensor_samples.h>
#include <trireme/strategies/fsdp/fsdp.h>
#include <trireme/strategies/fsdp/sharded_module.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace trireme {

// Returns the units in a module, itself left out.
std::vector<ShardedModule*> units_below(const torch::nn::Module& module);

// Copies what the user, or torch::load, has put in place of a shard's memory back into the memory
// that all ranks share; whole parameters are taken, too. Throws ValueError for what does not fit,
// with the shard as it was.
void copy_back(const ShardedParam& param, const std::string& name, RankOf where);

// All units under the outermost one, and their common state in a step. Made when the outermost unit
// is first used; collective where units gather that not all of its ranks share.
class ShardedModule::Root {
 public:
  // Throws c10::Error if a unit in it was used before it.
  explicit Root(const ShardedModule& unit);
  ~Root();
  Root(const Root&) = delete;
  Root& operator=(const Root&) = delete;

  // Called before the parameters are read: throws c10::Error for a shard that was written while
  // others may have read it, and for a member of the module that was.
  void copy_back_shards();
  // Called after Fsdp has begun to read.
  void note_members();
  void begin_reading();
  void begin_writing();
  Joining& joinable(ShardedModule& unit);
  // Returns the Joining of the model; null outside of a join.
  Joining* joining() const;
  // Throws ValueError in a join for a collective `call` that ranks without inputs do not follow.
  void refuse_in_join(const std::string& call) const;

  const ShardedModule* outermost;
  std::vector<const ShardedModule*> units;          // that have parameters of their own
  std::vector<std::shared_ptr<ParamGroup>> groups;  // theirs
  std::vector<FsdpRanks> ranks;                     // that share these; the outermost unit's first
  std::vector<size_t> ranks_of;                     // index into `ranks`, one per group
  std::vector<std::string> names;                   // names of all parameters, group by group
  std::shared_ptr<Fsdp> core;

 private:
  size_t place_of(const ShardedModule& unit);
  std::shared_ptr<Communicator> order_agreement() const;
  void check_writes();
  void check_members();
  void sample_shards();

  std::unique_ptr<Joining> joining_;                    // once asked for
  std::vector<std::shared_ptr<Communicator>> sharers_;  // parallel to `ranks`
  // Samples as last written: torch's C++ SGD writes `.data`, which no version counts.
  TensorSamples samples_;
  std::vector<int64_t> member_versions_;
};

}  // namespace trireme
