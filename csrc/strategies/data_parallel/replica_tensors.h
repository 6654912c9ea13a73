#pragma once

#include <trireme/common/export.h>
#include <trireme/module/module_replicas.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

// Keeps the tensors of replicas equal to their master's. Not thread-safe.
class TRIREME_API ReplicaTensors {
 public:
  // Fills the leaves and buffers of `module`, whatever they hold. Replica 0 has the master's own
  // buffers if it is on their device, so that what its forward writes there stays; the others have
  // copies. With `copy_always` no leaf shares memory with its master (tests of other devices).
  explicit ReplicaTensors(ModuleReplicas module, bool copy_always = false);

  // Brings the replicas up to date, in time for a forward: they follow a master that was given
  // other memory, a dtype or another requires_grad; copies are made again of tensors that were
  // written since, in one transfer per device. Costs a comparison per tensor where nothing changed,
  // and of buffers in the memory of the host one of their bytes.
  // Returns how many bytes were copied. Throws ValueError for a parameter that is not on the device
  // of replica 0.
  //
  // A graph of replicas that is older than a refresh raises where it would in one process: if the
  // versions of its tensors tell of a write. A tensor that is copied for another reason keeps its
  // version.
  int64_t refresh();
  // Called before a backward: autograd asks whether a leaf requires a gradient now, not in its
  // forward.
  void follow_masters();
  // Called after a backward, which an optimizer may follow that writes parameters under no version,
  // as torch::optim::SGD does through .data(): the next refresh() copies what it may have written.
  void expect_step() { may_have_stepped_ = true; }

  const ModuleReplicas& module() const { return module_; }
  size_t count() const { return module_.devices.size(); }
  // Returns the bytes that `replica` holds for itself: copies of parameters and buffers.
  int64_t own_bytes(size_t replica) const;

 private:
  // The source of a copy. set_data() and torch::load() give a master other memory under the same
  // version. A weak reference keeps the StorageImpl's address from being used again, so that
  // comparing addresses is enough.
  struct Copied {
    int64_t master = -1;  // versions after the copy; -1 if there was none
    int64_t copy = -1;
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> memory = {};
    int64_t offset = 0;  // in it
  };
  struct Stale;
  bool shares_leaf(size_t replica, size_t parameter) const;
  bool shares_buffer(size_t replica, size_t buffer) const;
  void check_devices() const;
  void refresh_leaves(size_t replica, bool first);
  void refresh_buffers(size_t replica, bool first);

  ModuleReplicas module_;
  bool copy_always_;
  bool may_have_stepped_ = false;
  std::vector<std::vector<Copied>> copied_leaves_;   // [replica][parameter]
  std::vector<std::vector<Copied>> copied_buffers_;  // [replica][buffer]
  int64_t copied_bytes_ = 0;
};

}  // namespace trireme
