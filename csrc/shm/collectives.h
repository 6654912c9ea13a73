#pragma once

#include <trireme/common/export.h>
#include <trireme/shm/host_group.h>
#include <trireme/shm/pieces.h>
#include <trireme/shm/slot_ring.h>

#include <chrono>
#include <cstdint>
#include <string_view>
#include <vector>

namespace trireme::shm {

// The arguments that every collective takes besides its memory.
struct CallOptions {
  std::chrono::milliseconds timeout{0};  // 0: the group's
  std::string_view label{};
  // Hash of the numbers of elements, if the data are a list of tensors, else 0: all_reduce,
  // reduce_scatter and all_gather compare it, too.
  uint64_t list_hash = 0;
};

struct ReduceOptions {
  Dtype dtype = Dtype::kF32;
  ReduceOp op = ReduceOp::kSum;
  double factor = 1;  // kPremulSum: this rank's own
};

// The collectives of the ranks of one host, through the slots of their rings. Each call is
// collective, blocks until this rank's part is done, and throws Fault (see host_group.h). No rank
// returns before all have entered with the same operation.
//
// Each rank reduces its own slice of a chunk, in rank order, from the slots of its peers and its
// own memory: one owner per element, so that all ranks hold the same bits, and the same in every
// run. A rank copies in (P-1)/P of its data and copies out as much; chunks are pipelined, so the
// slots stay in cache and memory sees one pass. Small tensors every rank reduces as a whole: one
// meeting instead of two.
//
// Ranks are those of the HostGroup, counted from 0. One thread at a time. Outputs must not overlap
// inputs, unless they are the same memory as said below.
class TRIREME_API Collectives {
 public:
  explicit Collectives(HostGroup& group) : group_(group), ring_(group) {}

  // Reduces in place.
  void all_reduce(const Pieces& memory, const ReduceOptions& how, const CallOptions& call);
  // Reduces so that only `root` gets the result; the others' memory stays as it is.
  void reduce(const Pieces& memory, int64_t root, const ReduceOptions& how,
              const CallOptions& call);
  // inputs[d] is for rank d, of the same size on all ranks; sizes may differ between d. The output
  // may be inputs[own rank].
  void reduce_scatter(const Pieces& output, const std::vector<Pieces>& inputs,
                      const ReduceOptions& how, const CallOptions& call);
  // outputs[s] is rank s's input, of any size. The input may be outputs[own rank].
  void all_gather(const std::vector<Pieces>& outputs, const Pieces& input, Dtype dtype,
                  const CallOptions& call);
  void broadcast(const Pieces& memory, int64_t root, Dtype dtype, const CallOptions& call);
  // outputs is empty except on the root; all inputs have one size.
  void gather(const std::vector<Pieces>& outputs, const Pieces& input, int64_t root, Dtype dtype,
              const CallOptions& call);
  // inputs is empty except on the root; all have the size of the output.
  void scatter(const Pieces& output, const std::vector<Pieces>& inputs, int64_t root, Dtype dtype,
               const CallOptions& call);
  // inputs[d] goes to rank d, outputs[s] comes from rank s; every pair may have its own size.
  void all_to_all(const std::vector<Pieces>& outputs, const std::vector<Pieces>& inputs,
                  Dtype dtype, const CallOptions& call);
  void barrier(const CallOptions& call);
  // Meets in a barrier whose error names every rank that does not come (HostGroup::roll_call).
  void roll_call(const CallOptions& call);
  // Meets in a barrier of ranks about to run `operation` by other means: compared like the rest.
  void meet(const Operation& operation, const CallOptions& call);
  // Makes a new segment of that many bytes on each rank, and returns all, by rank.
  std::vector<Segment> share_segments(int64_t bytes, const CallOptions& call);
  // Makes a new segment that all map, each rank's part of its pages on that rank's NUMA node (see
  // HostGroup::share_segment); returns none, with the reason, on all ranks alike.
  SharedSegment share_segment(int64_t bytes, const CallOptions& call);
  // Enters in place of a collective that this rank cannot take part in because of its arguments:
  // all ranks throw Fault(kMismatch), and nothing moves.
  [[noreturn]] void refuse(std::string_view reason, const CallOptions& call);

  HostGroup& group() { return group_; }

 private:
  class Scope;
  struct Reducing;
  using Sizes = std::vector<int64_t>;  // bytes, by rank

  void check_reducible(const ReduceOptions& how, const CallOptions& call);
  void reduce_all(Operation operation, const Pieces& memory, const ReduceOptions& how,
                  const CallOptions& call);
  void reduce_flat(Scope& scope, const Pieces& memory, const Reducing& reducing);
  void reduce_sliced(Scope& scope, const Pieces& memory, const Reducing& reducing);
  void multicast(Scope& scope, const Sizes& sizes, const Pieces& input,
                 const std::vector<Pieces>& outputs);
  void exchange(Scope& scope, const std::vector<Sizes>& sizes, const std::vector<Pieces>& inputs,
                const std::vector<Pieces>& outputs);
  std::vector<Sizes> sizes_of_all(Scope& scope, const Sizes& inputs, const Sizes& outputs);

  HostGroup& group_;
  SlotRing ring_;
};

}  // namespace trireme::shm
