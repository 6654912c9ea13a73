#pragma once

#include <trireme/activation/saved_tensor_hooks.h>
#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>

namespace trireme {

// [Note: one copy of what ranks have in common]
//
// Ranks of tensor parallelism, and all others that get one batch, checkpoint equal inputs: each
// would keep a copy of its own (ZeRO-R, arXiv 1910.02054, section 6.1). Here the ranks of a group
// keep one between them.
//
// * On one host it lies in shared memory (shared_arena.h). Each rank writes its part of it, then
//   compares all of it with what it has, bit by bit; the recomputation reads it where it is. So the
//   backward needs no other rank.
// * Elsewhere, and for tensors of a GPU, each rank keeps a slice. Values are compared by a hash,
// and
//   a recomputation gathers the slices, so that ranks must run their backwards in one order.
//
// Ranks say what they bring before anything moves. Where they differ all of them raise, name both,
// and can go on.
//
// An input stays as it is, with this rank alone, where a copy would be something else or would gain
// nothing: below kLeastPartitionedBytes, a leaf that requires a gradient (a parameter, whose
// identity counts), one with gaps between its elements (whose strides could not stay), one that is
// not dense, or that is of a class of Python's with its own dispatch. These may differ between
// ranks.

constexpr int64_t kLeastPartitionedBytes = 4096;

// Says how many bytes of checkpointed inputs are kept at the moment.
struct PartitionMemory {
  int64_t inputs = 0;  // what this rank would keep by itself
  int64_t shared = 0;  // part of these: in memory that the host has once, for all ranks
  int64_t slices = 0;  // this rank's slices of the others
  int64_t host = 0;    // what the host has given for `shared`, once; free blocks included
};

// Packs inputs of checkpoints: see the note. One thread at a time, and all ranks in one order.
class TRIREME_API PartitionPacker : public TensorPacker {
 public:
  virtual PartitionMemory memory() const = 0;
};

// Makes the packer of a group, for all checkpoints that the group shares. Its collectives have a
// communicator of their own, so that they may cross with those of a strategy. Collective over
// `communicator`. A group of one rank keeps its inputs as they are.
TRIREME_API c10::intrusive_ptr<PartitionPacker> make_partition_packer(
    std::shared_ptr<Communicator> communicator);

}  // namespace trireme
