#pragma once

// Parameter path 2/3. In: sharded_param.h  Out: prefetch.h

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>
#include <trireme/param/param_memory.h>
#include <trireme/param/sharded_param.h>

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace trireme {

// How a unit's module shows its parameters. Called by the thread that trains and by autograd's.
class TRIREME_API ModuleFace {
 public:
  virtual ~ModuleFace() = default;
  // Its parameters are the unsharded leaves from now on, or those that the optimizer has.
  virtual void show(bool unsharded) const = 0;
  // Of what the optimizer has.
  virtual bool requires_grad(size_t parameter) const = 0;
  // The user has set it on the unsharded leaf, which the module showed.
  virtual void set_requires_grad(size_t /*parameter*/, bool /*requires_grad*/) const {}
  // Counts in-place writes to that which the shard itself does not count.
  virtual uint32_t version(size_t /*parameter*/) const { return 0; }
};

struct ParamGroupRequest {
  std::vector<ShardedParamSpec> specs;
  // Of the ranks among which parameters are sharded.
  std::shared_ptr<Communicator> communicator;
  // Of the same ranks, for what is gathered: another one than gradients use, since ranks may come
  // to the two in different orders. `communicator` if null.
  std::shared_ptr<Communicator> gathers_with = nullptr;
  c10::Device device = c10::kCPU;
  // Gather also where ranks share memory.
  bool always_gathers = false;
  // Where units are gathered: of the n neighbouring ranks around this one among which the unit is
  // resharded, if not all. See [Note: pieces] in gathered_params.h.
  std::shared_ptr<Communicator> reshards_with = nullptr;
  // Of offloaded shards, and their gradients.
  bool pins_memory = true;
};

// Parameters that are unsharded and resharded together: those of one unit of a model. Who asks the
// unit's module for a parameter gets the sharded ones, or the unsharded ones. On CPU, where the
// ranks of a host share memory, nothing moves meanwhile; else they are gathered. See [Note: a
// parameter, sharded and unsharded].
//
// Memory: on a host, each dtype of the parameters once, that of param_dtype in addition; else see
// gathered_params.h. One thread at a time.
class TRIREME_API ParamGroup {
 public:
  // Collective; all ranks pass the same specs. Throws ValueError for none; c10::Error on all ranks
  // where memory that should be shared is refused, and on this one for pinned memory.
  explicit ParamGroup(ParamGroupRequest request);
  // Whether one of these would gather.
  static bool gathers_over(Communicator& communicator, c10::Device device);

  const std::vector<ShardedParam>& params() const { return params_; }
  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }
  const std::shared_ptr<Communicator>& gathers_with() const { return gathers_with_; }
  // Null if it reshards among all ranks.
  const std::shared_ptr<Communicator>& reshards_with() const { return reshards_with_; }
  c10::Device device() const { return device_; }
  // Null if it gathers.
  std::shared_ptr<HostStore> store() const { return memory_->store(); }
  bool gathers() const { return gathers_; }
  ParamMemory& memory() { return *memory_; }
  // "block 3: layer.1.weight .. layer.2.bias"
  const std::string& label() const { return label_; }
  void set_label(std::string label) { label_ = std::move(label); }

  // `leaves`: what gradients come to, over the memory of unsharded(), by parameter. `shown`: what
  // the module shows for them, where that is another tensor over that memory, of which gradients go
  // on into the leaf (Python's DTensors); the leaves if empty.
  void set_face(std::shared_ptr<const ModuleFace> face, std::vector<at::Tensor> leaves,
                std::vector<at::Tensor> shown = {});
  const std::vector<at::Tensor>& leaves() const { return leaves_; }

  // Whether reshard() is called when forward, and when backward, is over.
  void set_reshard_after_forward(bool reshard) { reshard_after_forward_ = reshard; }
  bool reshard_after_forward() const { return reshard_after_forward_; }
  void set_reshard_after_backward(bool reshard) { reshard_after_backward_ = reshard; }
  bool reshard_after_backward() const { return reshard_after_backward_; }
  // From now on the unit is resharded among all ranks. Every rank calls it, between the same two
  // gathers.
  void reshard_to_all();

  // Starts to gather the parameters, all of which ranks have written, once more if they are there.
  // Collective where the group gathers, and nothing else.
  void unshard();
  // Until they are there; nothing if they are not on their way.
  void wait_for_unshard();
  // Whether they are there, or on their way.
  bool has_unsharded() const { return has_unsharded_ || !gathers_; }
  // The module shows them; they are there.
  void show_unsharded();
  bool is_shown() const { return is_shown_; }
  // The module shows the sharded ones.
  void show_sharded();
  // That, and the memory of the others goes.
  void reshard();
  // The unsharded leaves require gradients where the sharded ones do, and the other way round where
  // it was set on a leaf.
  void follow_requires_grad();

  // What this rank wrote is complete: casts it where others read it in param_dtype, copies it where
  // the shard is offloaded, and notes autograd's counters.
  void finish_writes();
  // The same where there is no step gate yet: after it any rank may read what all have written.
  // Collective.
  void share_writes();
  // Parameters that were written in place since finish_writes(), sharded or unsharded, by index.
  std::vector<int64_t> changed_outside() const;
  // Others have written: a graph that still holds what was there before raises.
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
  // Of the shards, of what face_ shows for them, and of leaves_ with shown_, when writes were
  // complete.
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
  bool reshard_after_forward_ = true;
  bool reshard_after_backward_ = true;
};

}  // namespace trireme
