#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>
#include <trireme/memory/bucket_plan.h>
#include <trireme/memory/shard_plan.h>
#include <trireme/memory/tensor_samples.h>

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace trireme {

class PrivateInChildren;
namespace shm {
class Segment;
}

// [Note: parameters that a host has once]
//
// The mapping holds a cache line per rank, then the parameters where StoreLayout puts them. Every
// rank maps all of it, wherever its address space has room: whole(i) is the same memory on all
// ranks, at different addresses.
//
// Storages. A tensor over the store has a storage of its own, which spans exactly the tensor:
// torch.save, pickle, DCP and deepcopy see a parameter or a shard, not the model. They copy bytes,
// so their results are private. Each storage keeps the mapping alive, also after the store, the
// group and the other ranks have gone. None of them can be resized.
//
// Order. The store orders no reads and writes: that is the business of the step gate, which waits
// on the communicator. Writes of a rank before a collective are visible to all after it. version()
// tells a later reader which completed write of the host it sees; each rank counts in its own line,
// so no line has two writers.
//
// Writes outside the gate. Autograd counts in-place writes per tensor and its views
// (Tensor::_version). A rank notes the counters of its parameters when a gate ends and compares
// them when the next one begins. A write through `.data`, another process or a raw pointer is not
// counted; tensor_samples.h finds most of these. A write into the store from elsewhere (a peer's,
// or through a shard(), which counts for itself) becomes visible to autograd with bump_versions():
// a graph kept over a step then raises, as it does in torch.
//
// A forked child writes into a copy of its own, page by page. Pages that it has not written may
// change while the ranks train; see [Note: shared memory in a forked child] in common/forks.h.

// The parameters of a model in one mapping that all ranks of a host share. One thread at a time,
// but for version(), whole() and shard().
class TRIREME_API HostStore : public std::enable_shared_from_this<HostStore> {
 public:
  // Returns the bytes of the segment that make() takes for that many ranks of one host.
  static int64_t bytes_for(const std::vector<ParameterInfo>& parameters, int64_t world);

  // Makes a store. `segment`: new, all zeros, of at least bytes_for(); as this rank maps the memory
  // that all ranks of the host share. `parameters`: the same on all of them, on CPU. `where`: among
  // those ranks. Copies and writes nothing. Throws ValueError.
  static std::shared_ptr<HostStore> make(std::shared_ptr<const shm::Segment> segment,
                                         std::vector<ParameterInfo> parameters, RankOf where);

  const std::vector<ParameterInfo>& parameters() const { return parameters_; }
  // Returns the place among the ranks of this host.
  RankOf where() const { return where_; }

  // Returns all of a parameter, row-major, of its sizes and dtype. Each call makes a new tensor and
  // storage.
  at::Tensor whole(int64_t parameter) const;
  // Returns elements `range` of a parameter, as row-major `sizes` of as many (shard_sizes). Throws
  // ValueError.
  at::Tensor shard(int64_t parameter, const ShardRange& range, at::IntArrayRef sizes) const;
  // Returns whether `tensor` lies where whole() does, element for element: no longer after to(),
  // `p.data =` or swap_tensors; always, if the parameter has no elements.
  bool holds(int64_t parameter, const at::Tensor& tensor) const;

  // Two counters of each rank follow, for the step gate: the last write of which it has completed
  // its part, and the last one that it no longer reads.

  // Returns how many writes of this store all ranks have completed; starts at 0.
  uint64_t version() const;
  // Announces that this rank's part of write `version` is done; it only grows. Wakes no rank.
  void publish_version(uint64_t version);
  // Returns the version that a rank has published, to wait for it (HostGroup::wait_beside).
  const std::atomic<uint64_t>& version_of(int64_t rank) const;
  // Announces that this rank no longer reads `version`; `factor` is the factor of its gradients.
  void publish_release(uint64_t version, const FactorRange& factor = {});
  const std::atomic<uint64_t>& release_of(int64_t rank) const;
  // Returns the factor that was published with the last release that was seen.
  FactorRange factor_of(int64_t rank) const;

  // Notes autograd's counters, without changing them. `tensors`: one per parameter, or undefined.
  void snapshot_versions(const std::vector<at::Tensor>& tensors);
  // Returns which parameters were written in place since snapshot_versions(); none before the first
  // one. Ignores tensors that holds() refuses.
  std::vector<int64_t> changed_outside(const std::vector<at::Tensor>& tensors) const;
  // Counts a write for each of them; before snapshot_versions().
  static void bump_versions(const std::vector<at::Tensor>& tensors);

 private:
  // The counters that a rank publishes: a line that only it writes, with room for more. Zeros are a
  // store that no rank has written.
  struct alignas(64) RankLine {
    std::atomic<uint64_t> version;
    std::atomic<uint64_t> release;
    std::atomic<double> least_factor;
    std::atomic<double> most_factor;
  };

  HostStore(std::shared_ptr<const shm::Segment> segment, std::vector<ParameterInfo> parameters,
            RankOf where);
  RankLine& line_of(int64_t rank) const;
  const ParameterInfo& info_of(int64_t parameter) const;
  std::byte* data_of(int64_t parameter) const;

  std::shared_ptr<const shm::Segment> segment_;
  std::shared_ptr<const PrivateInChildren> private_in_children_;  // goes before the segment
  std::vector<ParameterInfo> parameters_;
  StoreLayout layout_;
  RankOf where_;
  std::vector<int64_t> versions_seen_;  // autograd's, by parameter
};

}  // namespace trireme
