#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/param/param_memory.h>

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <memory>
#include <string>
#include <vector>

namespace trireme {

// All of a parameter in a tensor of its own, as it lies in memory, from the shards of all ranks.
// Collective, unless every rank has its own copy.
at::Tensor gather_whole(const ShardedParamSpec& spec, const at::Tensor& shard,
                        Communicator& communicator);

// Parameters of which each rank has its shards, and gathers the rest into a buffer of its own when
// they are needed: on devices, between hosts, over any engine.
//
// The buffer holds, parameter by parameter, the shards of all ranks end to end, each with as many
// rows as the longest; since torch.chunk's rule leaves only the last ones short, the parameter is
// the front of that, whether its shards are even or not. A rank writes its own, cast to param_dtype
// if it has one, and all are gathered in place, in one collective. Between release() and gather()
// the unsharded tensors have no memory; they stay the same tensors.
//
// On devices all of it is ordered by the caller's current stream: nothing is synchronised.
//
// Memory: shards, 1/P of the parameters; while they are unsharded, a block of the pool of their
// size in param_dtype.
class GatheredParams final : public ParamMemory {
 public:
  // `communicator`: of the ranks that share them. Not collective.
  GatheredParams(const std::vector<ShardedParamSpec>& specs,
                 std::shared_ptr<Communicator> communicator, c10::Device device);

  ParamPlace place(int64_t parameter) const override;
  Pending gather(const std::string& label) override;
  void release() override;
  at::Tensor read_whole(int64_t parameter) override;
  void share_pool(std::shared_ptr<BufferPool> pool) override { pool_ = std::move(pool); }

 private:
  struct Entry {
    ShardedParamSpec spec;
    at::Tensor shard;  // as it lies in memory
    at::Tensor whole;
    at::Tensor region;     // of the buffer: what all ranks have, padded
    at::Tensor own;        // of that, this rank's part
    at::Tensor own_shard;  // of that, without padding
  };
  void lay_out(Entry& entry, const at::Tensor& buffer, int64_t offset_bytes) const;

  std::shared_ptr<Communicator> communicator_;
  c10::Device device_;
  std::vector<Entry> entries_;
  int64_t bytes_ = 0;
  c10::Storage storage_;  // of the buffer; without memory while released
  bool has_memory_ = false;
  std::shared_ptr<BufferPool> pool_;
};

}  // namespace trireme
