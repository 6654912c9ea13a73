#pragma once

// Parameter path 2/3. In: sharded_param.h  Out: prefetch.h

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>
#include <trireme/param/param_memory.h>
#include <trireme/param/sharded_param.h>

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace trireme {

// The face of a unit's module, which shows its parameters. Called by the training thread and by
// autograd's threads.
class TRIREME_API ModuleFace {
 public:
  virtual ~ModuleFace() = default;
  // Makes the module's parameters the unsharded leaves from now on, or those of the optimizer.
  virtual void show(bool unsharded) const = 0;
  // Returns whether the optimizer's parameter requires a gradient.
  virtual bool requires_grad(size_t parameter) const = 0;
  // Called when the user has set it on the unsharded leaf, which the module showed.
  virtual void set_requires_grad(size_t /*parameter*/, bool /*requires_grad*/) const {}
  // Returns how many in-place writes to the optimizer's parameter the shard does not count.
  virtual uint32_t version(size_t /*parameter*/) const { return 0; }
};

// The settings of a unit. Equal on all ranks; changed between steps.
struct UnitFlags {
  // Whether the unit is resharded when forward, and when backward, is over.
  bool reshard_after_forward = true;
  bool reshard_after_backward = true;
  // Whether backwards average the unit's gradients, which else accumulate on this rank. Read, like
  // all below, when a backward begins that averages gradients.
  bool synchronizes = true;
  // Whether they sum them up over ranks that hold the same shards, too. If not, the sums of the
  // sharing ranks wait on this rank for the next backward that does.
  bool all_reduces = true;
  double divide_factor = 0;  // divisor of gradients; 0: the number of ranks
  // Called with this rank's part of the averaged gradients, in one row, before they become .grad;
  // see strategies/fsdp/all_reduce_hooks.h.
  std::function<void(at::Tensor& gradients)> all_reduce_hook = {};
};

struct ParamGroupRequest {
  std::vector<ShardedParamSpec> specs;
  // The communicator of the ranks among which parameters are sharded.
  std::shared_ptr<Communicator> communicator;
  // A second communicator of these ranks, for gathers, since ranks may come to gathers and to
  // gradients in different orders. `communicator` if null.
  std::shared_ptr<Communicator> gathers_with = nullptr;
  c10::Device device = c10::kCPU;
  // Whether to gather even if ranks share memory.
  bool always_gathers = false;
  // The communicator of the n neighbouring ranks among which the unit is resharded; all ranks if
  // null. Used if units are gathered. See [Note: pieces] in gathered_params.h.
  std::shared_ptr<Communicator> reshards_with = nullptr;
  // Whether to pin the memory of offloaded shards and their gradients.
  bool pins_memory = true;
};

// Parameters that are unsharded and resharded together: those of one unit of a model. The unit's
// module shows the sharded ones, or the unsharded ones. On CPU, if the ranks of a host share
// memory, nothing moves meanwhile; else they are gathered. See [Note: a parameter, sharded and
// unsharded].
//
// Memory: on a host, each dtype of the parameters once, that of param_dtype in addition; else see
// gathered_params.h. One thread at a time.
class TRIREME_API ParamGroup {
 public:
  // Collective; all ranks pass the same specs. Throws ValueError for none; c10::Error on all ranks
  // if shared memory is refused, and on this one if pinned memory is.
  explicit ParamGroup(ParamGroupRequest request);
  // Returns whether a group over these ranks and this device gathers, always_gathers aside.
  static bool gathers_over(Communicator& communicator, c10::Device device);

  const std::vector<ShardedParam>& params() const { return params_; }
  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }
  const std::shared_ptr<Communicator>& gathers_with() const { return gathers_with_; }
  // Returns null if the group reshards among all ranks.
  const std::shared_ptr<Communicator>& reshards_with() const { return reshards_with_; }
  c10::Device device() const { return device_; }
  // Returns null if the group gathers.
  std::shared_ptr<HostStore> store() const { return memory_->store(); }
  bool gathers() const { return gathers_; }
  ParamMemory& memory() { return *memory_; }
  // Returns the name in messages: "block 3: layer.1.weight .. layer.2.bias".
  const std::string& label() const { return label_; }
  void set_label(std::string label) { label_ = std::move(label); }

  // Sets the face. `leaves` receive gradients, over the memory of unsharded(), by parameter.
  // `shown` are the tensors that the module shows for them; the leaves if empty. A shown tensor may
  // be another one over that memory, whose gradients go on into the leaf (Python's DTensors).
  void set_face(std::shared_ptr<const ModuleFace> face, std::vector<at::Tensor> leaves,
                std::vector<at::Tensor> shown = {});
  const std::vector<at::Tensor>& leaves() const { return leaves_; }

  UnitFlags& flags() { return flags_; }
  const UnitFlags& flags() const { return flags_; }
  // Makes the unit reshard among all ranks from now on. Every rank calls it, between the same two
  // gathers.
  void reshard_to_all();

  // Starts to gather the parameters that all ranks have written, once more if they are there.
  // Collective if the group gathers; else does nothing.
  void unshard();
  // Waits until the parameters are there; returns at once if they are not on their way.
  void wait_for_unshard();
  // Returns whether the parameters are there, or on their way.
  bool has_unsharded() const { return has_unsharded_ || !gathers_; }
  // Makes the module show the unsharded parameters, which must be there.
  void show_unsharded();
  bool is_shown() const { return is_shown_; }
  // Makes the module show the sharded parameters.
  void show_sharded();
  // Makes the module show the sharded parameters, and frees the gathered ones.
  void reshard();
  // Makes the unsharded leaves require gradients where the sharded parameters do, and the other way
  // round where the user set it on a leaf.
  void follow_requires_grad();

  // Completes this rank's writes: casts them if others read them in param_dtype, copies them if the
  // shard is offloaded, and notes autograd's counters.
  void finish_writes();
  // Completes the writes of all ranks if there is no step gate yet: after it any rank may read
  // them. Collective.
  void share_writes();
  // Returns the parameters that were written in place since finish_writes(), sharded or unsharded,
  // by index.
  std::vector<int64_t> changed_outside() const;
  // Makes a graph raise that holds values from before others wrote.
  void bump_unsharded();

 private:
  void note_versions();

  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<Communicator> gathers_with_;
  std::shared_ptr<Communicator> reshards_with_;
  c10::Device device_;
  std::shared_ptr<ParamMemory> memory_;
  bool gathers_ = false;
  std::vector<ShardedParam> params_;
  std::shared_ptr<const ModuleFace> face_;
  std::vector<at::Tensor> leaves_;
  std::vector<at::Tensor> shown_;
  std::vector<bool> leaves_require_grad_;  // when last followed
  std::string label_;
  // Autograd's counters when writes were complete: of the shards, of the tensors that face_ shows
  // for them, and of leaves_ with shown_.
  struct Versions {
    uint32_t shard = 0;
    uint32_t shown = 0;
    uint32_t leaf = 0;
    bool operator==(const Versions&) const = default;
  };
  Versions versions_of(size_t parameter) const;
  std::vector<Versions> versions_;
  Pending gathering_;
  bool has_unsharded_ = false;
  bool is_shown_ = false;
  UnitFlags flags_;
};

}  // namespace trireme
