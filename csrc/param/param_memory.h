#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/comm/host.h>
#include <trireme/common/export.h>
#include <trireme/param/sharded_param.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace trireme {

class BufferPool;
class HostStore;

// Where the parameters of a group lie, and how all of them come to a rank. See [Note: a parameter,
// sharded and unsharded] in sharded_param.h. One thread at a time.
class TRIREME_API ParamMemory {
 public:
  virtual ~ParamMemory() = default;

  // Returns the tensors of a parameter, always the same ones.
  virtual ParamPlace place(int64_t parameter) const = 0;

  // Starts to bring the shards of all ranks into `whole`, once more if it is there already; it may
  // be read when the Pending is done. Collective if anything moves. `label` names the gather in
  // errors. Throws what all_gather does, and c10::OutOfMemoryError.
  virtual Pending gather(const std::string& label) = 0;
  // Called when `whole` is no longer read.
  virtual void release() = 0;

  // Returns whether the next gather is one of pieces, of the shards that ranks had at an earlier
  // one. See [Note: pieces] in gathered_params.h.
  virtual bool has_pieces() const { return false; }
  // Makes the next gather one of whole shards, and gives up the pieces that this rank has kept.
  // Every rank calls it, between the same two gathers.
  virtual void forget_pieces() {}
  // Forgets pieces as forget_pieces() does, and makes all later gathers bring whole shards.
  virtual void reshard_to_all() {}

  // Returns all of a parameter in its own dtype, not to be written to. Collective if anything
  // moves.
  virtual at::Tensor read_whole(int64_t parameter) = 0;

  // Returns the tensors that each rank of the group writes and others read, for the step gate to
  // bring to all hosts; empty unless there are several hosts, each of which has a store().
  virtual PartsByRank parts() const { return {}; }
  // Returns the memory of a host that all its ranks read, and need not gather; else null.
  virtual std::shared_ptr<HostStore> store() const { return nullptr; }

  // Returns this rank's part of a gradient in memory like that of the shard. A copy into pinned
  // memory may still be under way: it runs after the earlier work of the caller's current stream,
  // and the gradient may be freed.
  virtual at::Tensor to_shard(int64_t /*parameter*/, const at::Tensor& gradient) {
    return gradient;
  }
  // Calls `copy`, which copies shards to the device if gathers do not.
  virtual void copy_shards(const std::function<void()>& copy) { copy(); }
  // Waits until copies out of shards are done, so that these may be written.
  virtual void finish_copies() {}

  // Sets where the memory of `whole` comes from.
  virtual void share_pool(std::shared_ptr<BufferPool> /*pool*/) {}
};

}  // namespace trireme
