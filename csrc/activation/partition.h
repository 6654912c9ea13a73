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
// Ranks of tensor parallelism, and all others that get the same batch, checkpoint equal inputs:
// each would keep its own copy (ZeRO-R, arXiv 1910.02054, section 6.1). Here the ranks of a group
// keep one copy together.
//
// * On one host the copy lies in shared memory (shared_arena.h). Each rank writes its part of it,
//   then compares all of it with its own input, bit by bit; the recomputation reads it in place. So
//   the backward needs no other rank.
// * Across hosts, and for GPU tensors, each rank keeps a slice. Values are compared by a hash.
//   A recomputation gathers the slices, so ranks must run their backwards in one order.
//
// Ranks exchange descriptions of their inputs before any data moves. If these differ, all ranks
// raise an error that names them, and can go on.
//
// A rank keeps an input itself, unpartitioned, if a copy could not replace it or would save
// nothing: below kLeastPartitionedBytes, a leaf that requires a gradient (a parameter, whose
// identity counts), one with gaps between its elements (whose strides could not stay), one that is
// not dense, or an instance of a Python class with its own dispatch. Such inputs may differ between
// ranks.

constexpr int64_t kLeastPartitionedBytes = 4096;

// The bytes of checkpointed inputs that are kept at present.
struct PartitionMemory {
  int64_t inputs = 0;  // what this rank would keep without partitioning
  int64_t shared = 0;  // part of these: in shared memory, once for all ranks of the host
  int64_t slices = 0;  // this rank's slices of the remaining inputs
  int64_t host = 0;    // shared memory of the host, counted once; free blocks included
};

// The packer of checkpoints' inputs: see the note. One thread at a time, all ranks in one order.
class TRIREME_API PartitionPacker : public SavedTensorPacker {
 public:
  virtual PartitionMemory memory() const = 0;
};

// Makes the packer of a group, for all checkpoints that the group shares. Its collectives use a
// communicator of their own, so their order relative to a strategy's collectives is free.
// Collective over `communicator`. A group of one rank keeps its inputs as they are.
TRIREME_API c10::intrusive_ptr<PartitionPacker> make_partition_packer(
    std::shared_ptr<Communicator> communicator);

}  // namespace trireme
