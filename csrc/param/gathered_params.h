#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/memory/stream_handoff.h>
#include <trireme/param/param_memory.h>

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace trireme {

// Returns all of a parameter, as it lies in memory, in a tensor of its own, from the shards of all
// ranks. Collective, unless every rank has its own copy.
at::Tensor gather_whole(const ShardedParamSpec& spec, const at::Tensor& shard,
                        Communicator& communicator);

// [Note: pieces]
//
// A unit may be resharded among n neighbouring ranks in place of all P, so that backward gathers it
// from these. A rank that releases a unit that was gathered from all ranks first copies its piece,
// 1/n of the buffer, which is the padded shards of P/n neighbours, into a block of its own; the
// next gather copies it back and gathers the n pieces in place.
//
// Which ranks a gather needs must be the same on all of them, whether one has released the unit or
// still has it. So it depends on events common to all: after a gather from all ranks, and until
// forget_pieces(), which all call between the same two gathers, every further gather is one of
// pieces; a rank that still has the unit has its piece in place.

// This rank's shards of parameters, and a buffer into which the rest is gathered when needed: on
// devices, between hosts, over any engine.
//
// The buffer holds, parameter by parameter, the shards of all ranks end to end, each with as many
// rows as the longest; since torch.chunk's rule leaves only the last ones short, the parameter is
// the front of that, whether its shards are even or not. A rank writes its own, cast to param_dtype
// if it has one, and all are gathered in place, in one collective. Between release() and gather()
// the unsharded tensors have no memory, and whoever reads or writes them gets a
// c10::Error; they stay the same tensors.
//
// Offloaded shards lie in CPU memory, pinned if possible, and are copied to the device when they
// are gathered, or, with ShardOffload::kOptimizer, once when they were written.
//
// On devices all of it is ordered by the caller's current stream: nothing is synchronised. Copies
// from CPU memory, and gathers of what they bring, run beside that stream, as gathers do anyway.
//
// Memory: shards, 1/P of the parameters; while they are unsharded, a block of the pool of their
// size in param_dtype; while there are pieces, 1/n of that.
class GatheredParams final : public ParamMemory {
 public:
  struct Request {
    std::vector<ShardedParamSpec> specs;
    std::shared_ptr<Communicator> communicator;  // the ranks that share them
    // The n neighbouring ranks around this one among which units are resharded; all ranks if null.
    std::shared_ptr<Communicator> reshards_with = nullptr;
    c10::Device device = c10::kCPU;
    bool pins_memory = true;  // pins offloaded shards and their gradients
  };
  // Not collective. Throws ValueError unless n is a factor of P, above 1 and below P; c10::Error if
  // pinned memory is refused.
  explicit GatheredParams(Request request);

  ParamPlace place(int64_t parameter) const override;
  Pending gather(const std::string& label) override;
  void release() override;
  at::Tensor read_whole(int64_t parameter) override;
  void share_pool(std::shared_ptr<BufferPool> pool) override { pool_ = std::move(pool); }
  bool has_pieces() const override { return has_pieces_; }
  void forget_pieces() override;
  void reshard_to_all() override;
  at::Tensor to_shard(int64_t parameter, const at::Tensor& gradient) override;
  void copy_shards(const std::function<void()>& copy) override;
  void finish_copies() override { copies_.wait(); }

 private:
  struct Entry {
    ShardedParamSpec spec;
    at::Tensor shard;   // this rank's shard, as it lies in memory
    at::Tensor copied;  // copy of an offloaded one on the device, in param_dtype; undefined without
    at::Tensor whole;
    at::Tensor region;     // part of the buffer: the shards of all ranks, padded
    at::Tensor own;        // this rank's part of the region
    at::Tensor own_shard;  // that part without padding
    at::Tensor piece;      // part of the region that this rank keeps
  };
  Entry make_entry(const ShardedParamSpec& spec) const;
  at::Tensor on_host(at::IntArrayRef sizes, const ShardedParamSpec& spec) const;
  void lay_out(Entry& entry, const at::Tensor& buffer, int64_t offset_bytes) const;
  void take_buffer(const std::string& label);
  Pending gather_now(bool of_pieces, const std::string& label);
  void copy_in_shards(bool only_replicated);
  void copy_pieces(bool into_buffer) const;
  std::string sharers_text() const;

  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<Communicator> reshards_with_;
  c10::Device device_;
  bool pins_memory_;
  std::vector<Entry> entries_;
  int64_t bytes_ = 0;
  c10::Storage storage_;  // the buffer's; without memory while released
  bool has_memory_ = false;
  std::shared_ptr<BufferPool> pool_;
  bool has_pieces_ = false;  // equal on all ranks
  int64_t pieces_bytes_ = 0;
  at::Tensor pieces_;          // this rank's, once the buffer was released
  bool is_offloaded_ = false;  // whether any parameter is
  StreamHandoff copies_;       // copies out of offloaded shards, and their gathers
};

}  // namespace trireme
