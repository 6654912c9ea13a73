#pragma once

// Parameter path 2/2. In: sharded_param.h  Out: forward and backward

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>
#include <trireme/param/sharded_param.h>

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

// Parameters that are unsharded and resharded together: those of one unit of a model. On a host's
// shared memory nothing moves when they are, so that a group is what changes hands together: who
// asks the unit's module for a parameter gets the sharded ones, or the unsharded ones.
//
// Memory: each dtype of the parameters once per host, that of param_dtype in addition. One thread
// at a time.
class TRIREME_API ParamGroup {
 public:
  // Collective over the ranks of `communicator`, which share a host's memory, or are one. All pass
  // the same specs. Throws ValueError on all ranks where they differ; c10::Error where memory is
  // not shared.
  ParamGroup(std::vector<ShardedParamSpec> specs, std::shared_ptr<Communicator> communicator);

  const std::vector<ShardedParam>& params() const { return params_; }
  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }
  const std::shared_ptr<HostStore>& store() const { return stores_.original; }

  // `leaves`: what autograd works on, over the memory of unsharded(), by parameter.
  void set_face(std::shared_ptr<const ModuleFace> face, std::vector<at::Tensor> leaves);
  const std::vector<at::Tensor>& leaves() const { return leaves_; }

  // Whether reshard() is called when forward, and when backward, is over.
  void set_reshard_after_forward(bool reshard) { reshard_after_forward_ = reshard; }
  bool reshard_after_forward() const { return reshard_after_forward_; }
  void set_reshard_after_backward(bool reshard) { reshard_after_backward_ = reshard; }
  bool reshard_after_backward() const { return reshard_after_backward_; }

  bool is_unsharded() const { return is_unsharded_; }
  // The parameters have been written by all ranks: the step gate has seen to that.
  void unshard();
  void reshard();
  // The unsharded leaves require gradients where the sharded ones do, and the other way round where
  // it was set on a leaf.
  void follow_requires_grad();

  // What this rank wrote is complete: casts it where a param_dtype asks for that, and notes
  // autograd's counters.
  void finish_writes();
  // Parameters that were written in place since finish_writes(), sharded or unsharded, by index.
  std::vector<int64_t> changed_outside() const;
  // Others have written: a graph that still holds what was there before raises.
  void bump_unsharded();

 private:
  void note_versions();

  std::shared_ptr<Communicator> communicator_;
  ParamStores stores_;
  std::vector<ShardedParam> params_;
  std::vector<at::Tensor> shards_;  // of params_
  std::shared_ptr<const ModuleFace> face_;
  std::vector<at::Tensor> leaves_;
  std::vector<bool> leaves_require_grad_;  // when last followed
  // By face_, and of leaves_, when writes were complete.
  std::vector<uint32_t> versions_;
  std::vector<uint32_t> leaf_versions_;
  bool is_unsharded_ = false;
  bool reshard_after_forward_ = true;
  bool reshard_after_backward_ = true;
};

}  // namespace trireme
