#include <trireme/strategies/data_parallel/replica_tensors.h>

#include <trireme/common/error.h>
#include <trireme/common/resolved.h>
#include <trireme/kernels/flatten.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>

#include <cstring>
#include <map>
#include <utility>

namespace trireme {
namespace {

// Larger tensors gain nothing from travelling together.
constexpr int64_t kCoalescedBytes = int64_t{1} << 20;

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.layout() == b.layout() &&
         (a.layout() != at::kStrided || a.strides() == b.strides());
}

bool share_storage(const at::Tensor& a, const at::Tensor& b) {
  return a.has_storage() && b.has_storage() && a.storage().is_alias_of(b.storage());
}

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return same_layout(a, b) && share_storage(a, b) && a.storage_offset() == b.storage_offset();
}

int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? -1 : tensor._version();
}

// Returns whether `flatten` takes the tensor, and whether it is small enough to gain by it.
bool is_flattened(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.is_non_overlapping_and_dense() &&
         (tensor.is_floating_point() || tensor.is_complex()) && is_resolved(tensor) &&
         static_cast<int64_t>(tensor.nbytes()) < kCoalescedBytes;
}

// Batch norm in training writes its statistics under the same version, and its schema does not say
// so: buffers that may be such statistics are copied every time.
bool writes_unseen(const at::Tensor& buffer) {
  return buffer.is_floating_point() && buffer.dim() <= 1;
}

// Writes through .data have no version either. Where both are in the memory of the host, values are
// compared; codebooks that a forward moves are written so.
bool differs(const at::Tensor& buffer, const at::Tensor& copy) {
  if (!buffer.is_cpu() || !copy.is_cpu() || !same_layout(buffer, copy)) return false;
  const auto is_plain = [](const at::Tensor& tensor) {
    return tensor.has_storage() && tensor.is_non_overlapping_and_dense() && is_resolved(tensor);
  };
  return !is_plain(buffer) || !is_plain(copy) ||
         std::memcmp(buffer.const_data_ptr(), copy.const_data_ptr(), buffer.nbytes()) != 0;
}

bool may_be_stepped(const at::Tensor& parameter) {
  return parameter.requires_grad() || parameter.grad().defined();
}

at::ScalarType real_type(const at::Tensor& tensor) {
  return c10::toRealValueType(tensor.scalar_type());
}

}  // namespace

// The copies that one replica has to make.
struct ReplicaTensors::Stale {
  std::vector<at::Tensor> masters;
  std::vector<at::Tensor> copies;
  std::vector<Copied*> notes;

  void look_at(const at::Tensor& master, at::Tensor& copy, Copied& note, bool always) {
    const bool shared = share_storage(master, copy);
    if (shared || !same_layout(master, copy)) {
      if (shared) torch::autograd::impl::set_version_counter(copy, c10::VariableVersion(0));
      copy.set_data(at::empty_like(master, master.options().device(copy.device())));
      note = {};
    }
    if (!always && same_versions(master, copy, note) && same_place(master, note)) return;
    masters.push_back(master);
    copies.push_back(copy);
    notes.push_back(&note);
  }

  int64_t copy() {
    const at::NoGradGuard no_grad;
    std::map<at::ScalarType, std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>>> together;
    int64_t bytes = 0;
    for (size_t i = 0; i < masters.size(); ++i) {
      bytes += static_cast<int64_t>(masters[i].nbytes());
      const at::Tensor target = target_of(i);
      const bool travels = masters[i].device() != copies[i].device();
      if (travels && is_flattened(masters[i])) {
        auto& [from, to] = together[real_type(masters[i])];
        from.push_back(masters[i]);
        to.push_back(target);
      } else {
        target.copy_(masters[i], /*non_blocking=*/true);
      }
    }
    for (auto& [dtype, lists] : together) {
      const at::Tensor flat = flatten(lists.first, dtype);
      unflatten(flat.to(lists.second.front().device(), /*non_blocking=*/true), lists.second);
    }
    for (size_t i = 0; i < masters.size(); ++i) *notes[i] = note_of(masters[i], copies[i]);
    return bytes;
  }

 private:
  static Copied note_of(const at::Tensor& master, const at::Tensor& copy) {
    Copied note{version_of(master), version_of(copy)};
    if (!master.has_storage()) return note;
    note.memory = master.storage().getWeakStorageImpl();
    note.offset = master.storage_offset();
    return note;
  }
  static bool same_versions(const at::Tensor& master, const at::Tensor& copy, const Copied& note) {
    return note.master >= 0 && note.master == version_of(master) && note.copy == version_of(copy);
  }
  static bool same_place(const at::Tensor& master, const Copied& note) {
    if (!master.has_storage() || !note.memory) return !master.has_storage() && !note.memory;
    return note.memory->_unsafe_get_target() == master.storage().unsafeGetStorageImpl() &&
           note.offset == master.storage_offset();
  }
  // Returns copy i, or its memory under a version of its own where no version tells of a change.
  at::Tensor target_of(size_t i) const {
    const bool unseen = same_versions(masters[i], copies[i], *notes[i]) && copies[i].has_storage();
    return unseen ? copies[i].variable_data() : copies[i];
  }
};

ReplicaTensors::ReplicaTensors(ModuleReplicas module, bool copy_always)
    : module_(std::move(module)),
      copy_always_(copy_always),
      copied_leaves_(module_.devices.size()),
      copied_buffers_(module_.devices.size()) {
  check_devices();
  const c10::InferenceMode no_inference(false);  // tensors made here outlive it
  for (size_t replica = 0; replica < count(); ++replica) {
    TORCH_INTERNAL_ASSERT(module_.leaves[replica].size() == module_.parameters.size() &&
                          module_.replica_buffers[replica].size() == module_.buffers.size());
    copied_leaves_[replica].resize(module_.parameters.size());
    copied_buffers_[replica].resize(module_.buffers.size());
    refresh_leaves(replica, /*first=*/true);
    refresh_buffers(replica, /*first=*/true);
  }
}

void ReplicaTensors::check_devices() const {
  for (size_t i = 0; i < module_.parameters.size(); ++i)
    TORCH_CHECK_VALUE(module_.parameters[i].device() == module_.devices.front(),
                      error_text("data_parallel",
                                 "got parameter '" + module_.names[i] + "' on " +
                                     module_.parameters[i].device().str() + ", expected it on " +
                                     module_.devices.front().str() + ", the device of replica 0",
                                 {}, "Move the module there, or name its device first."));
}

int64_t ReplicaTensors::refresh() {
  check_devices();
  const c10::InferenceMode no_inference(false);
  copied_bytes_ = 0;
  for (size_t replica = 0; replica < count(); ++replica) {
    refresh_leaves(replica, /*first=*/false);
    refresh_buffers(replica, /*first=*/false);
  }
  may_have_stepped_ = false;
  return copied_bytes_;
}

void ReplicaTensors::follow_masters() {
  for (const std::vector<at::Tensor>& leaves : module_.leaves)
    for (size_t i = 0; i < leaves.size(); ++i) follow_master(module_.parameters[i], leaves[i]);
}

int64_t ReplicaTensors::own_bytes(size_t replica) const {
  int64_t bytes = 0;
  for (size_t i = 0; i < module_.parameters.size(); ++i)
    if (!shares_leaf(replica, i))
      bytes += static_cast<int64_t>(module_.leaves[replica][i].nbytes());
  for (size_t i = 0; i < module_.buffers.size(); ++i)
    if (!shares_buffer(replica, i))
      bytes += static_cast<int64_t>(module_.replica_buffers[replica][i].nbytes());
  return bytes;
}

bool ReplicaTensors::shares_leaf(size_t replica, size_t parameter) const {
  return !copy_always_ && module_.parameters[parameter].device() == module_.devices[replica];
}

bool ReplicaTensors::shares_buffer(size_t replica, size_t buffer) const {
  return replica == 0 && module_.buffers[buffer].device() == module_.devices[replica];
}

void ReplicaTensors::refresh_leaves(size_t replica, bool first) {
  Stale stale;
  for (size_t i = 0; i < module_.parameters.size(); ++i) {
    const at::Tensor& master = module_.parameters[i];
    at::Tensor& leaf = module_.leaves[replica][i];
    if (!shares_leaf(replica, i)) {
      stale.look_at(master, leaf, copied_leaves_[replica][i],
                    may_have_stepped_ && may_be_stepped(master));
    } else if (first || !same_memory(master, leaf)) {
      share_tensor(master, leaf);
    }
    follow_master(master, leaf);
  }
  copied_bytes_ += stale.copy();
}

void ReplicaTensors::refresh_buffers(size_t replica, bool first) {
  Stale stale;
  for (size_t i = 0; i < module_.buffers.size(); ++i) {
    const at::Tensor& master = module_.buffers[i];
    at::Tensor& copy = module_.replica_buffers[replica][i];
    if (!shares_buffer(replica, i)) {
      stale.look_at(master, copy, copied_buffers_[replica][i],
                    writes_unseen(master) || differs(master, copy));
    } else if (first || !same_memory(master, copy)) {
      share_tensor(master, copy);
    }
  }
  copied_bytes_ += stale.copy();
}

}  // namespace trireme
